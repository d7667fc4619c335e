#!/usr/bin/env bash
# Set up this machine as a host: host.sh SUBNET NUMBER HOST... (all hosts in order). Can be repeated.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# Vagrant copies only this script; common.sh is then in the synced directory.
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

# Storage with the same path on all hosts, and the kernel of the lab's guests.
for folder in /var/lib/vmckpt/labs/vagrant/shared /var/cache/vmckpt; do
    mkdir -p "$folder"
    grep -q " $folder nfs" /etc/fstab ||
        echo "controller:$folder $folder nfs4 _netdev,hard,noatime 0 0" >>/etc/fstab
    [ -n "$rehearsal" ] || mountpoint -q "$folder" || mount "$folder"
done

# Memory is sent over the hosts' network, whatever the host names resolve to.
keep_block /etc/libvirt/qemu.conf <<END
migration_host = "$address"
migration_address = "$address"
END
# All these machines have the same owner, so they share one ssh key for root.
keys=/var/lib/vmckpt/labs/vagrant/shared/.keys
if [ -d "$keys" ]; then
    install -d -m 700 /root/.ssh
    install -m 600 "$keys/id_ed25519" /root/.ssh/id_ed25519
    keep_block /root/.ssh/authorized_keys <"$keys/id_ed25519.pub"
    ssh-keyscan -t ed25519 "$@" 2>/dev/null | keep_block /root/.ssh/known_hosts
fi
tell_systemd restart libvirtd
echo "$(hostname) is a host at $address"
