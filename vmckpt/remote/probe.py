"""Probe a host over ssh: facts, certificates, and the addresses that it can reach.

The scripts print lines of the form `key value`. Only `same_files` writes: a temporary file.
"""

import base64
import re
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath

from vmckpt.errors import RemoteError
from vmckpt.model.host import (
    CA,
    CLIENT,
    CLIENT_KEY,
    SERVER,
    SERVER_KEY,
    HostProbe,
    NoTrace,
    QemuCertificates,
)
from vmckpt.remote.shell_files import FILES
from vmckpt.remote.ssh import Remote, last_line
from vmckpt.units import Bytes, Seconds

CERTIFICATES = (
    "/etc/pki/CA/cacert.pem",
    "/etc/pki/libvirt/servercert.pem",
    "/etc/pki/libvirt/clientcert.pem",
    "/etc/pki/qemu/server-cert.pem",
    "/etc/pki/qemu/client-cert.pem",
)
_PRESENT = 'for f in "$@"; do if [ -e "$f" ]; then echo y; else echo n; fi; done'
TRACED = frozenset({"x86_64", "aarch64"})
"""Machine names of the processors on which agents can trace QEMU; see `architecture`."""
UNTESTED = frozenset({"aarch64"})
"""Machine names of those processors on which tracing QEMU has never been tried."""
_SYS_PTRACE = 19
"""Number of the capability CAP_SYS_PTRACE."""

# QEMU fetches missing pages with the system call userfaultfd; the device does not help, since only
# root can open it. QEMU's user is libvirt-qemu on Debian, unless qemu.conf sets another user.
_MAY_FAULT = r"""
value() { sed -n "s/^ *$1 *= *\"\{0,1\}\([^\" ]*\).*/\1/p" /etc/libvirt/qemu.conf 2>/dev/null; }
may_fault() {
    [ "$(cat /proc/sys/vm/unprivileged_userfaultfd 2>/dev/null)" = 1 ] && return 0
    case $(value user) in
    root | 0 | +0) [ -r /proc/sys/vm/unprivileged_userfaultfd ] && return 0 ;;
    esac
    return 1
}
"""
# Clears the soft-dirty bits of the shell, which then writes to its stack. Without
# CONFIG_MEM_SOFT_DIRTY, no bit is ever set. Bit 55 is the highest bit of the seventh byte.
_SOFT_DIRTY = r"""
soft_dirty() {
    stack=$(sed -n 's/-.*\[stack\]$//p' /proc/$$/maps)
    [ -n "$stack" ] && { echo 4 >/proc/$$/clear_refs; } 2>/dev/null || return
    dd if=/proc/$$/pagemap bs=8 skip=$((0x$stack / 4096)) count=256 2>/dev/null |
        od -An -v -tx1 -w8 | grep -q '^\( ..\)\{6\} [89a-f]'
}
"""
# printf is used because dash's echo would turn a backslash and an n into a line break.
_SCRIPT = (
    _MAY_FAULT
    + _SOFT_DIRTY
    + r"""
say() { printf '%s\n' "$1"; }
say "clock $(date +%s.%N)"
for link in /sys/class/net/*; do say "link ${link##*/}"; done
[ -e /dev/kvm ] && say "kvm yes"
{ [ -e /dev/userfaultfd ] || [ -r /proc/sys/vm/unprivileged_userfaultfd ]; } && say "uffd there"
may_fault && say "uffd usable"
backing=$(sed -n 's/^ *memory_backing_dir *= *"\(.*\)".*/\1/p' /etc/libvirt/qemu.conf 2>/dev/null)
backing=${backing:-/var/lib/libvirt/qemu/ram}
say "backing $backing"
at=$backing; while [ ! -e "$at" ] && [ "$at" != / ]; do at=$(dirname "$at"); done
say "backing-kind $(stat -f -c %T "$at" 2>/dev/null)"
say "machine $(uname -m)"
say "kernel $(uname -r)"
soft_dirty && say "soft-dirty yes"
say "yama $(cat /proc/sys/kernel/yama/ptrace_scope 2>/dev/null)"
say "deny-ptrace $(cut -c1 /sys/fs/selinux/booleans/deny_ptrace 2>/dev/null)"
say "caps $(sed -n 's/^CapEff:[[:space:]]*//p' /proc/self/status)"
[ -d /run/systemd/system ] && command -v systemd-run >/dev/null && say "systemd yes"
for path in "$@"; do
    case $path in
    *.pem) [ -r "$path" ] && say "pem $path $(base64 -w0 <"$path")";;
    *) [ -d "$path" ] && say "room $(df -PB1 -- "$path" | awk 'NR==2 {print $4}') $path";;
    esac
done
"""
)


async def probe_host(remote: Remote, storage: Iterable[str]) -> HostProbe:
    """Read facts about a host. Raises RemoteError or HostKeyRefused.

    `storage`: directories whose free space is read.
    """
    await remote.run(["true"])  # so that connecting does not count as clock skew
    before = time.time()
    answer = await remote.run(["sh", "-s", "--", *storage, *CERTIFICATES], text=_SCRIPT)
    return parse(answer.out, asked=before, answered=time.time(), host=remote.host.name)


def parse(text: str, *, asked: float, answered: float, host: str) -> HostProbe:
    """Parse the script's answer. Raises RemoteError if it is invalid.

    `asked` and `answered`: this machine's clock before and after the script ran, in seconds since
    1970.
    """
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,12})?", clock := _first(found, "clock")):
        raise _nonsense(host, text)
    room = [value.split(" ", 1) for value in found.get("room", []) if " " in value]
    if not all(re.fullmatch("[0-9]{1,18}", size) for size, _ in room):
        raise _nonsense(host, "\n".join(size for size, _ in room))
    pems = [value.split(" ", 1) for value in found.get("pem", []) if " " in value]
    return HostProbe(
        # The host read its clock at an unknown time between `asked` and `answered`: Cristian's
        # estimate (Probabilistic clock synchronization, 1989).
        clock_skew=Seconds(float(clock) - (asked + answered) / 2),
        clock_uncertainty=Seconds((answered - asked) / 2),
        links=frozenset(found.get("link", [])),
        kvm_device="kvm" in found,
        userfaultfd="uffd" in found,
        post_copy_by_root_only="usable" not in found.get("uffd", []),
        memory_backing_dir=_first(found, "backing"),
        memory_backing_kind=_first(found, "backing-kind") or "missing",
        storage_free={path: Bytes(int(size)) for size, path in room},
        certificates={path: decoded(body) for path, body in pems},
        kernel=_kernel(_first(found, "kernel")),
        no_trace=_no_trace(found),
        untested=_first(found, "machine") in UNTESTED,
        soft_dirty="soft-dirty" in found,
        systemd="systemd" in found,
    )


def _kernel(release: str) -> tuple[int, int] | None:
    """Return the version of a kernel release such as "6.12.9-amd64"; None for any other text."""
    match = re.match(r"([0-9]{1,4})\.([0-9]{1,4})(?![0-9])", release)
    return None if match is None else (int(match[1]), int(match[2]))


def _no_trace(found: dict[str, list[str]]) -> NoTrace | None:
    """Return why agents cannot trace QEMU, or None; facts that are not reported are ignored."""
    if _first(found, "machine") not in ("", *TRACED):
        return NoTrace.PROCESSOR
    if _first(found, "yama") == "3":
        return NoTrace.YAMA
    if _first(found, "deny-ptrace") == "1":
        return NoTrace.SELINUX
    caps = _first(found, "caps")
    if re.fullmatch("[0-9a-f]{1,16}", caps) and not int(caps, 16) >> _SYS_PTRACE & 1:
        return NoTrace.CAPABILITY
    return None


def _nonsense(host: str, text: str) -> RemoteError:
    return RemoteError(
        f"{host}: the probe returned an invalid answer: {text[:80]!r}",
        host=host,
        hint="make sure that logins on the host print nothing",
    )


def decoded(body: str) -> str:
    """Decode a file from base64; "" if it is empty or invalid."""
    try:
        return base64.b64decode(body, validate=True).decode(errors="replace")
    except ValueError:
        return ""


def _first(found: dict[str, list[str]], key: str) -> str:
    return found.get(key, [""])[0]


async def uptime(remote: Remote) -> Seconds:
    """Return how long the host has been up. Raises RemoteError."""
    answer = await remote.run(["cat", "/proc/uptime"])
    try:
        return Seconds(float(answer.out.split()[0]))
    except (ValueError, IndexError):
        raise _nonsense(remote.host.name, answer.out) from None


async def links(remote: Remote) -> frozenset[str]:
    """Return the bridges and network interfaces of a host. Raises RemoteError."""
    said = await remote.run(["ls", "-1", "/sys/class/net"])
    return frozenset(said.out.split())


async def same_files(source: Remote, target: Remote, files: Sequence[str]) -> dict[str, bool]:
    """Return, for each path, whether both hosts have the same file at this path.

    Symbolic links are followed first. Then a file with random content is created in the directory
    on the source, read on the target, and removed. This is necessary because equal paths, sizes and
    even inode numbers can belong to different disks of cloned hosts, and a user of both hosts could
    create a file with the same name. If the links lead to equal paths in a directory that is not
    writable on the source, nothing is known about the file, which is left out. Raises RemoteError.
    """
    here, there = await _resolved(source, files), await _resolved(target, files)
    shared: dict[str, bool | None] = {}
    for folder in sorted({str(PurePosixPath(path).parent) for path in here.values()}):
        shared[folder] = await _same_folder(source, target, folder)
    same = {}
    for name in files:
        proof = shared[str(PurePosixPath(here[name]).parent)]
        if here[name] != there[name]:
            same[name] = False
        elif proof is not None:
            same[name] = proof
    return same


_RESOLVE = (
    FILES
    + r"""
for file in "$@"; do
    if reach "$file"; then
        at=$(pwd -P; echo .); at=${at%??}
        printf '%s/%s' "${at%/}" "$name"
    fi
    printf '\0'
done
"""
)


async def _resolved(host: Remote, files: Sequence[str]) -> dict[str, str]:
    """Resolve the symbolic links in each path; a path that cannot be resolved stays as it is.

    Only links that no other user can have created are followed. Raises RemoteError.
    """
    found = (await host.run(["sh", "-s", "--", *files], text=_RESOLVE)).out.split("\0")
    # There is one empty part after the last zero byte. Paths must be absolute.
    if len(found) != len(files) + 1 or not all(one == "" or one[0] == "/" for one in found):
        raise _nonsense(host.host.name, "\n".join(found))
    return {name: line or name for name, line in zip(files, found, strict=False)}


# The content is not an argument, so no process list shows it.
_PLANT = (
    FILES
    + r"""
umask 077
enter "$1" || exit 1
content=$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')
printf %s "$content" | dd of="./$2" conv=excl status=none || exit 1
printf %s "$content"
"""
)
_FOUND = (
    FILES
    + r"""
enter "$1" && [ -f "./$2" ] && [ ! -L "./$2" ] || exit 1
exec dd if="./$2" iflag=nofollow,nonblock bs=64 count=1 status=none
"""
)
_UPROOT = (
    FILES
    + r"""
enter "$1" && rm -f -- "./$2"
"""
)


async def _same_folder(source: Remote, target: Remote, folder: str) -> bool | None:
    name = f".vmckpt-probe-{secrets.token_hex(8)}"
    planted = await source.run(["sh", "-s", "--", folder, name], text=_PLANT)
    try:
        if planted.status != 0:
            return None
        if not re.fullmatch("[0-9a-f]{32}", planted.out):
            raise _nonsense(source.host.name, planted.out)
        found = await target.run(["sh", "-s", "--", folder, name], text=_FOUND)
        return found.status == 0 and found.out == planted.out
    finally:
        await source.run(["sh", "-s", "--", folder, name], text=_UPROOT)


async def peer_login(source: Remote, uri: str) -> str | None:
    """Return why the source cannot log in to the target's libvirtd; None if it can.

    Also None if the source has no virsh for the test; then only the migration will show a failure.
    `uri`: the target's libvirt URI, as seen from the source. Raises RemoteError.
    """
    answer = await source.run(
        ["timeout", "6", "virsh", "-q", "-c", uri, "hostname"], limit=Seconds(8.0)
    )
    if answer.status in (0, 127):
        return None
    if answer.status == 124:
        return "no answer within 6 s"
    return last_line(answer.err, f"virsh exited with {answer.status}").removeprefix("error: ")


async def reachable(source: Remote, address: str, port: int) -> bool:
    """Return whether packets from the source reach a port; a refused connection also proves this.

    Raises RemoteError.
    """
    answer = await source.run(
        ["timeout", "3", "bash", "-c", 'exec 3<>"/dev/tcp/$0/$1"', address, str(port)],
        limit=Seconds(6.0),
    )
    return answer.status == 0 or "refused" in answer.err.lower()


_KVM_SCRIPT = r"""
[ "$(uname -m)" = x86_64 ] || exit 3
for kernel in "/boot/vmlinuz-$(uname -r)" /boot/vmlinuz-* /var/cache/vmckpt/guest/*/vmlinuz; do
    [ -r "$kernel" ] && break
done
[ -r "$kernel" ] || exit 3
out=$(timeout 5 qemu-system-x86_64 -accel kvm -m 256 -nodefaults -display none -no-reboot \
    -serial stdio -kernel "$kernel" -append "console=ttyS0 panic=-1" </dev/null 2>&1)
case $out in *"Kernel panic"*|*"Run /init"*) exit 0;; *) exit 1;; esac
"""


async def kvm_boots(remote: Remote) -> bool | None:
    """Return whether KVM boots an ordinary kernel, up to its search for a root disk.

    KVM may fail to boot the kernel although /dev/kvm exists. None: the host has no kernel for the
    test, or another architecture than x86-64. Raises RemoteError.
    """
    answer = await remote.run(["sh", "-s"], text=_KVM_SCRIPT, limit=Seconds(15.0))
    return None if answer.status == 3 else answer.status == 0


_POST_COPY = (
    _MAY_FAULT
    + r"""
at=$(value memory_backing_dir); at=${at:-/var/lib/libvirt/qemu/ram}
while [ ! -e "$at" ] && [ "$at" != / ]; do at=$(dirname "$at"); done
stat -f -c %T "$at" 2>/dev/null || echo unknown
may_fault
"""
)


async def post_copy(target: Remote) -> tuple[str | None, str]:
    """Return why guests cannot migrate to the host by post-copy, and the type of a file system.

    The reason is None if post-copy is possible. The file system is the one for memory files of
    guests with file-backed memory. Raises RemoteError.
    """
    answer = await target.run(["sh", "-s"], text=_POST_COPY)
    kind = last_line(answer.out, "unknown")
    if answer.status == 0:
        return None, kind
    return "QEMU cannot use userfaultfd (sysctl vm.unprivileged_userfaultfd is not 1)", kind


# The directory is determined as in libvirt: the setting for migrations, the directory for
# migrations if it exists, the default setting, the default directory. Disk copies use the same
# directory. QEMU itself reads the files, as its own user. By default, this is the user that the
# packages of Debian or Fedora create.
_CERTIFICATES_SCRIPT = r"""
say() { printf '%s\n' "$1"; }
value() {
    sed -n "s/^[[:space:]]*$1[[:space:]]*=[[:space:]]*//p" /etc/libvirt/qemu.conf 2>/dev/null |
        tail -n 1 | sed -e 's/^"\([^"]*\)".*/\1/' -e t -e "s/^'\([^']*\)'.*/\1/" -e t \
            -e 's/[[:space:]]*#.*//' -e 's/[[:space:]]*$//'
}
folder=$(value migrate_tls_x509_cert_dir)
if [ -z "$folder" ] && [ -d /etc/pki/libvirt-migrate ]; then folder=/etc/pki/libvirt-migrate; fi
if [ -z "$folder" ]; then folder=$(value default_tls_x509_cert_dir); fi
folder=${folder:-/etc/pki/qemu}
verify=$(value migrate_tls_x509_verify)
if [ -z "$verify" ]; then verify=$(value default_tls_x509_verify); fi
say "folder $folder"
say "verify ${verify:-1}"
say "hostname $(hostname)"
there=
for name in "$@"; do
    [ -s "$folder/$name" ] && say "present $name" && there="$there $name"
    case $name in
    *cert.pem) [ -r "$folder/$name" ] && say "pem $name $(base64 -w0 <"$folder/$name")";;
    esac
done
user=$(value user)
user=${user#+}
for name in libvirt-qemu qemu; do
    [ -n "$user" ] || ! id "$name" >/dev/null 2>&1 || user=$name
done
group=$(value group)
group=${group#+}
if [ "$(id -u "$user" 2>/dev/null || echo 0)" != 0 ]; then
    say "user $user"
    setpriv --reuid "$user" --regid "${group:-$(id -gn "$user")}" --init-groups sh -c '
        folder=$1
        shift
        if [ ! -x "$folder" ]; then
            while up=$(dirname "$folder") && [ ! -x "$up" ]; do folder=$up; done
            printf "unreadable .\nclosed %s\n" "$folder"
            exit 0
        fi
        for name in "$@"; do [ -r "$folder/$name" ] || echo "unreadable $name"; done
    ' sh "$folder" $there 2>/dev/null
fi
exit 0
"""


async def present(host: Remote, files: Sequence[str]) -> dict[str, bool]:
    """Return, for each file, whether it exists on a host. Raises RemoteError or HostKeyRefused."""
    answer = await host.run(["sh", "-s", "--", *files], text=_PRESENT)
    answers = answer.out.split()
    if len(answers) != len(files) or not set(answers) <= {"y", "n"}:
        raise RemoteError(
            f"{host.host.name}: looking for files: invalid answer",
            host=host.host.name,
            hint="make sure that logins on the host print nothing",
        )
    return {file: said == "y" for file, said in zip(files, answers, strict=True)}


async def look_at_certificates(host: Remote) -> QemuCertificates:
    """Read QEMU's certificates on a host. Raises RemoteError or HostKeyRefused."""
    answer = await host.run(
        ["sh", "-s", "--", CA, SERVER, SERVER_KEY, CLIENT, CLIENT_KEY], text=_CERTIFICATES_SCRIPT
    )
    return parse_certificates(answer.out, host.host.name)


def parse_certificates(text: str, host: str) -> QemuCertificates:
    """Parse the script's answer. Raises RemoteError if it is invalid."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    if not {"folder", "verify", "hostname"} <= set(found):
        raise RemoteError(
            f"{host}: reading QEMU's certificates: invalid answer: {text[:80]!r}",
            host=host,
            hint="make sure that logins on the host print nothing",
        )
    pems = [value.split(" ", 1) for value in found.get("pem", []) if " " in value]
    return QemuCertificates(
        folder=found["folder"][0],
        verifies_clients=found["verify"][0] != "0",
        present=frozenset(found.get("present", [])),
        pems={name: decoded(body) for name, body in pems},
        hostname=found["hostname"][0],
        unreadable=frozenset(found.get("unreadable", [])),
        closed=found.get("closed", [""])[0],
        user=found.get("user", [""])[0],
    )
