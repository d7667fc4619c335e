#!/usr/bin/env bash
# Set up this machine as the controller: controller.sh SUBNET HOST... Can be run repeatedly.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
common=common.sh
[ -e "$common" ] || common=/vmckpt/vagrant/provision/common.sh
# shellcheck source=vagrant/provision/common.sh
source "$common"
subnet=$1
shift

need_root_and_apt
packages nfs-kernel-server chrony postgresql postgresql-contrib
name_hosts "$subnet" "$@"
bridge_guests "198.19.$subnet.1/24"

lab=/var/lib/vmckpt/labs/vagrant
mkdir -p "$lab/shared/.keys" "$lab/shared/snapshots" /var/cache/vmckpt /etc/vmckpt /root/.ssh
chmod 700 "$lab/shared/.keys" /root/.ssh
keep_block /etc/exports <<END
$lab/shared 198.18.$subnet.0/24(rw,no_root_squash,sync,no_subtree_check)
/var/cache/vmckpt 198.18.$subnet.0/24(ro,no_subtree_check)
END
tell_systemd restart nfs-kernel-server
[ -e "$lab/shared/.keys/id_ed25519" ] ||
    ssh-keygen -q -t ed25519 -N "" -C vmckpt-vagrant -f "$lab/shared/.keys/id_ed25519"
install -m 600 "$lab/shared/.keys/id_ed25519" /root/.ssh/id_ed25519

# Install vmckpt from the synced directory for all users of this machine.
rm -rf /opt/vmckpt.new
mkdir -p /opt/vmckpt.new
tar -c -C "$source_dir" --exclude ./.venv --exclude ./.tools --exclude ./.backports --exclude ./.git . |
    tar -x -C /opt/vmckpt.new
[ ! -d /opt/vmckpt/.venv ] || mv /opt/vmckpt/.venv /opt/vmckpt.new/
rm -rf /opt/vmckpt
mv /opt/vmckpt.new /opt/vmckpt
[ -n "$rehearsal" ] || (cd /opt/vmckpt && install_python requirements-run.lock)
ln -sf /opt/vmckpt/.venv/bin/vmckpt /usr/local/bin/vmckpt

# The inventory, for vmckpt and its lab.
{
    echo "hosts:"
    number=11
    for name in "$@"; do
        cat <<END
  $name:
    uri: qemu+ssh://root@$name/system?keyfile=/root/.ssh/id_ed25519
    ssh: {address: $name, user: root, key_file: /root/.ssh/id_ed25519}
    migration_address: 198.18.$subnet.$number
    labels: {lab: vagrant}
    storage: [$lab/shared]
    networks: [guests]
END
        number=$((number + 1))
    done
    echo "stores: {near: $lab/shared/snapshots}"
    echo "observer: $lab/observer.sock"
} >/etc/vmckpt/hosts.yaml
ln -sf /etc/vmckpt/hosts.yaml "$lab/hosts.yaml"
echo "{\"name\": \"vagrant\", \"subnet\": $subnet, \"host_count\": $#, \"witness\": false}" >"$lab/lab.json"

# The observer that watches guests from outside, as in the lab.
cat >/etc/systemd/system/vmckpt-observer.service <<END
[Unit]
Description=vmckpt, observer of the lab's guests
After=network-online.target

[Service]
ExecStart=/opt/vmckpt/.venv/bin/python -m vmckpt_lab.observer.server 198.19.$subnet.1 $lab/observer.sock
Restart=on-failure

[Install]
WantedBy=multi-user.target
END
tell_systemd daemon-reload
tell_systemd enable --now vmckpt-observer
echo "the controller is ready; once the hosts are ready, run: VMCKPT_INVENTORY=/etc/vmckpt/hosts.yaml vmckpt doctor"
