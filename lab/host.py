"""Lab hosts: their private directories, power and reachability."""

import grp
import os
import pwd
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import vmckpt
from vmckpt.errors import LabError
from vmckpt_lab import certificates, config_files, network
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import HostPlan, LabPlan
from vmckpt_lab.shell import in_namespace, start_daemon

_PORTS = {"ssh": 22, "libvirt": 16509, "libvirt over TLS": 16514}


def furnish(plan: LabPlan, host: HostPlan, authority: certificates.Authority) -> str:
    """Create a host's private directories, configuration and keys.

    Returns the host's public ssh host key, as one line.
    """
    for name in ("root/.ssh", "libvirt", "log", "cache", "private"):
        (host.root / name).mkdir(parents=True, mode=0o700)
    for name in ("libvirt", "log", "private"):  # QEMU needs access, whichever user it runs as
        (host.root / name).chmod(0o755)
    etc = host.root / "etc"
    shutil.copytree("/etc", etc, symlinks=True, ignore_dangling_symlinks=True)
    shutil.rmtree(etc / "libvirt/qemu", ignore_errors=True)
    (etc / "libvirt").mkdir(exist_ok=True)
    user = plan.qemu_user
    group = grp.getgrgid(pwd.getpwnam(user).pw_gid).gr_name
    (etc / "libvirt/libvirtd.conf").write_text(config_files.libvirtd(host))
    (etc / "libvirt/qemu.conf").write_text(config_files.qemu(host, user, group))
    (etc / "ssh/lab_sshd_config").write_text(config_files.sshd(host))
    (etc / "hosts").write_text(config_files.hosts_file(plan))
    certificates.install(authority, etc, host.name, [host.address], qemu_user=user)
    return certificates.ssh_key(etc / "ssh/lab_host_key")


def befriend(plan: LabPlan, host_keys: dict[str, str]) -> None:
    """Let the controller log in to all hosts, and each host to the others.

    `host_keys`: each host's public ssh host key, by the host's name.
    """
    controller = certificates.ssh_key(plan.folder / "ssh/id_ed25519")
    own = {
        host.name: certificates.ssh_key(host.root / "root/.ssh/id_ed25519") for host in plan.hosts
    }
    known = "".join(f"{host.name},{host.address} {host_keys[host.name]}\n" for host in plan.hosts)
    (plan.folder / "ssh/known_hosts").write_text(known)
    for host in plan.hosts:
        folder = host.root / "root/.ssh"
        (folder / "known_hosts").write_text(known)
        allowed = [controller, *(key for name, key in own.items() if name != host.name)]
        (folder / "authorized_keys").write_text("".join(f"{key} lab\n" for key in allowed))
    wrapper = plan.folder / "ssh/ssh"
    wrapper.write_text(
        f"#!/bin/sh\nexec ssh -i {plan.folder}/ssh/id_ed25519 -o BatchMode=yes"
        f" -o StrictHostKeyChecking=yes -o UserKnownHostsFile={plan.folder}/ssh/known_hosts"
        ' "$@"\n'
    )
    wrapper.chmod(0o755)


def power_on(plan: LabPlan, host: HostPlan) -> None:
    """Start a host's first process, without waiting until the host answers."""
    script = host.root / "boot.sh"
    # vmckpt's agents on the host run from the same files.
    programs = dict.fromkeys((str(Path(vmckpt.__file__).parents[1]), sys.prefix))
    script.write_text(config_files.boot_script(plan, host, tuple(programs)))
    unshare = [
        "unshare",
        "--mount",
        "--uts",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
        "bash",
    ]
    command = in_namespace(host.namespace, *unshare, str(script))
    start_daemon(command, host.root / "boot.log")


def wait_until_up(host: HostPlan, *, limit: float = 30.0) -> None:
    """Wait until ssh and libvirt accept connections.

    Raises LabError with the last line of the host's log if they do not within `limit` seconds.
    """
    give_up = Deadline(limit)
    for what, port in _PORTS.items():
        while not _answers(host.address, port):
            if give_up.passed():
                raise LabError(f"host {host.name}: {what} does not answer; {_last_words(host)}")
            time.sleep(0.05)


def is_up(host: HostPlan) -> bool:
    """Return whether the host's first process is running."""
    return first_process(host) is not None


def first_process(host: HostPlan) -> int | None:
    """Return the process ID, on this machine, of the host's process 1; None if the host is off."""
    for pid in network.processes_in(host.namespace):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            line = next((x for x in status.splitlines() if x.startswith("NSpid:")), "")
            if line.split()[-1:] == ["1"]:
                return pid
    return None


def power_off(host: HostPlan) -> None:
    """Kill the host's first process; the kernel then kills all others. Raises LabError."""
    if (pid := first_process(host)) is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    network.kill_all([host.namespace])


def enter(host: HostPlan, *args: str) -> list[str]:
    """Return the command that runs `args` in a host's namespaces.

    Raises LabError if the host is off.
    """
    pid = first_process(host)
    if pid is None:
        raise LabError(f"host {host.name} is off", hint=f"run vmckpt lab heal {host.name}")
    return ["nsenter", "-t", str(pid), "-m", "-u", "-n", "-p", "--", *args]


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=1.0):
            return True
    except OSError:
        return False


def _last_words(host: HostPlan) -> str:
    for path in (host.root / "boot.log", host.root / "log/libvirtd.log"):
        if path.exists() and (lines := path.read_text(errors="replace").strip().splitlines()):
            return f"{path}: {lines[-1]}"
    return "the host has no log"
