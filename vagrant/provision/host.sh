#!/usr/bin/env bash
# Make this machine a host: host.sh SUBNET NUMBER NAME... (all hosts in their order). May be run again.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# vagrant copies a script alone; the rest of it is in the synced folder.
common=common.sh
[ -e "$common" ] || common=/vmckpt/vagrant/provision/common.sh
# shellcheck source=vagrant/provision/common.sh
source "$common"
subnet=$1 number=$2
shift 2
address=198.18.$subnet.$number

need_root_and_apt
packages nfs-common chrony
name_hosts "$subnet" "$@"
bridge_guests ""

# Storage that all hosts see under one path, and the kernel of the lab's guests.
for folder in /var/lib/vmckpt/labs/vagrant/shared /var/cache/vmckpt; do
    mkdir -p "$folder"
    grep -q " $folder nfs" /etc/fstab ||
        echo "controller:$folder $folder nfs4 _netdev,hard,noatime 0 0" >>/etc/fstab
    [ -n "$rehearsal" ] || mountpoint -q "$folder" || mount "$folder"
done

# Memory is sent over the network of the hosts, whatever names resolve to.
keep_block /etc/libvirt/qemu.conf <<END
migration_host = "$address"
migration_address = "$address"
END
# One key for root of all these machines: they are one person's.
keys=/var/lib/vmckpt/labs/vagrant/shared/.keys
if [ -d "$keys" ]; then
    install -d -m 700 /root/.ssh
    install -m 600 "$keys/id_ed25519" /root/.ssh/id_ed25519
    keep_block /root/.ssh/authorized_keys <"$keys/id_ed25519.pub"
    ssh-keyscan -t ed25519 "$@" 2>/dev/null | keep_block /root/.ssh/known_hosts
fi
tell_systemd restart libvirtd
echo "$(hostname) is a host at $address"
