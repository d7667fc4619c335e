"""Generate the text of a lab's configuration files. Pure."""

from collections.abc import Sequence
from shlex import quote

from vmckpt_lab.plan import CACHE, HostPlan, LabPlan


def libvirtd(host: HostPlan) -> str:
    """Return libvirtd.conf.

    libvirtd accepts plain TCP for speed, and TLS as in production. Each host has its own UUID;
    otherwise libvirt would consider all hosts to be the same host.
    """
    return f"""\
listen_tcp = 1
listen_tls = 1
listen_addr = "{host.address}"
auth_tcp = "none"
auth_unix_ro = "none"
auth_unix_rw = "none"
host_uuid = "{host.uuid}"
keepalive_interval = 5
keepalive_count = 3
log_filters = "4:util.dbus 4:util.udev"
log_outputs = "2:file:/var/log/libvirt/libvirtd.log"
"""


def qemu(host: HostPlan, user: str, group: str) -> str:
    """Return qemu.conf, without sandboxing. Incoming migrations use the host's own address.

    `user`, `group`: which QEMU runs as.
    """
    return f"""\
user = "{user}"
group = "{group}"
security_driver = "none"
namespaces = []
cgroup_controllers = []
stdio_handler = "file"
remember_owner = 0
migration_host = "{host.address}"
migration_address = "{host.address}"
memory_backing_dir = "/dev/shm/ram"
default_tls_x509_cert_dir = "/etc/pki/qemu"
default_tls_x509_verify = 1
"""


def sshd(host: HostPlan) -> str:
    """Return sshd_config: root logs in with a key only, on the host's own address."""
    return f"""\
ListenAddress {host.address}
HostKey /etc/ssh/lab_host_key
PidFile /run/sshd.pid
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
StrictModes no
AuthorizedKeysFile /root/.ssh/authorized_keys
AcceptEnv LANG
"""


def hosts_file(plan: LabPlan) -> str:
    """Return /etc/hosts, with every host of the lab."""
    lines = ["127.0.0.1 localhost", *(f"{host.address} {host.name}" for host in plan.hosts)]
    if plan.witness:
        lines.append(f"{plan.witness_address} witness")
    return "\n".join(lines) + "\n"


_OWN = ("/tmp", "/root", "/run", "/dev/shm")
"""Directories of this machine that are hidden on a host by its own directories."""


def boot_script(plan: LabPlan, host: HostPlan, programs: Sequence[str] = ()) -> str:
    """Return the script that a host's first process runs in the host's namespaces.

    The script remains process 1: when it dies, the kernel kills all processes of the host, as in a
    power-off. `programs`: directories that must be visible on the host, even if they are below one
    of its private directories.
    """
    root = host.root
    hidden = [path for path in programs if any(path.startswith(f"{own}/") for own in _OWN)]
    # The directories are opened before private ones are mounted over them, and then bind-mounted
    # back by file descriptor. Without -c, mount would use their paths, which are hidden by then.
    held = "".join(f"exec {8 - n}<{quote(path)}\n" for n, path in enumerate(hidden))
    shown = "".join(
        f"mkdir -p {quote(path)}\nmount -c --bind /proc/self/fd/{8 - n} {quote(path)}\n"
        f"exec {8 - n}<&-\n"
        for n, path in enumerate(hidden)
    )
    return f"""\
set -eu
{held}hostname {host.name}
mount --make-rprivate /
mount --bind {root}/etc /etc
mount --bind {root}/root /root
mount --bind {root}/libvirt /var/lib/libvirt
mount --bind {root}/log /var/log/libvirt
mount --bind {root}/cache /var/cache/libvirt
mount --bind {root}/private {plan.private}
mount -t tmpfs -o mode=755 tmpfs /run
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
{_kvm(plan)}{shown}mkdir -p /run/sshd /run/lock /run/libvirt /dev/shm/ram
/usr/sbin/sshd -f /etc/ssh/lab_sshd_config
/usr/sbin/libvirtd --daemon --listen
while :; do sleep 1000 & wait $! || true; done
"""


def _kvm(plan: LabPlan) -> str:
    """Return a command that creates /dev/kvm as udev does; empty if QEMU runs as root.

    If QEMU's user cannot open /dev/kvm, libvirt probes QEMU's capabilities again at every call.
    """
    if plan.qemu_user == "root":
        return ""
    return "mknod -m 666 /run/kvm c 10 232 && mount --bind /run/kvm /dev/kvm || :\n"


def inventory(plan: LabPlan, key_file: str, known_hosts: str) -> str:
    """Return the lab's hosts.yaml, which commands find automatically; see current.inventory.

    `key_file`, `known_hosts`: paths of the ssh files for logins on the hosts.
    """
    lines = [f"# Written by vmckpt lab up; the hosts of lab {plan.name!r}.", "hosts:"]
    for host in plan.hosts:
        lines += [
            f"  {host.name}:",
            f"    uri: qemu+tcp://{host.address}/system",
            f"    ssh: {{address: {host.address}, user: root, key_file: {key_file},"
            f" known_hosts: {known_hosts}}}",
            f"    migration_address: {host.address}",
            "    labels: {lab: " + plan.name + "}",
            f"    storage: [{CACHE}, {plan.shared}, {plan.private}]",  # kernels are in CACHE
            "    networks: [guests]",
            f"    agent_state: {host.root}/agent",
        ]
    lines.append(f"stores: {{near: {plan.shared}/snapshots}}")
    if plan.witness:
        lines.append(f"lease: postgresql://postgres@{plan.witness_address}/postgres")
    lines.append(f"observer: {plan.observer_socket}")
    return "\n".join(lines) + "\n"
