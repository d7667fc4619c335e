"""A look at the certificates that a host's QEMU encrypts migration streams with."""

from vmckpt.errors import RemoteError
from vmckpt.model.host import (
    CA,
    CLIENT,
    CLIENT_KEY,
    SERVER,
    SERVER_KEY,
    QemuCertificates,
)
from vmckpt.remote.probe import decoded
from vmckpt.remote.ssh import Remote

# The folder is found as libvirt finds it: the migrations' own key, the migrations' own folder if
# there is one, the key for all purposes, the folder for all purposes. Copied disks use the same.
# QEMU reads them itself, as its user: by default the one that Debian's or Fedora's packages make.
_SCRIPT = r"""
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
        [ -x "$folder" ] || { echo "unreadable ."; exit 0; }
        for name in "$@"; do [ -r "$folder/$name" ] || echo "unreadable $name"; done
    ' sh "$folder" $there 2>/dev/null
fi
exit 0
"""


async def look(host: Remote) -> QemuCertificates:
    """Look at a host. Raises RemoteError or HostKeyRefused."""
    answer = await host.run(
        ["sh", "-s", "--", CA, SERVER, SERVER_KEY, CLIENT, CLIENT_KEY], text=_SCRIPT
    )
    return parse(answer.out, host.host.name)


def parse(text: str, host: str) -> QemuCertificates:
    """Read the script's answer."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        found.setdefault(key, []).append(value)
    if not {"folder", "verify", "hostname"} <= set(found):
        raise RemoteError(
            f"{host}: the look at its certificates makes no sense: {text[:80]!r}",
            mend="see that logins there print nothing",
        )
    pems = [value.split(" ", 1) for value in found.get("pem", []) if " " in value]
    return QemuCertificates(
        folder=found["folder"][0],
        verifies_clients=found["verify"][0] != "0",
        present=frozenset(found.get("present", [])),
        pems={name: decoded(body) for name, body in pems},
        hostname=found["hostname"][0],
        unreadable=frozenset(found.get("unreadable", [])),
        user=found.get("user", [""])[0],
    )
