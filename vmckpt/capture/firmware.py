"""What a machine keeps beside its disks: NVRAM and the state of a TPM, as small files of its host.

Names in a snapshot: "nvram", and "tpm/…" for what is in the TPM's folder.
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.domain_xml import path_of
from vmckpt.util.host_files import FileRefused, Folder, opened

NVRAM, TPM = "nvram", "tpm"
_TPM_FOLDER = PurePosixPath("/var/lib/libvirt/swtpm")
# A manifest holds 64 MiB of such files.
_LARGEST, _MOST = 32 << 20, 64 << 20
_DEEPEST = 8
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def nvram(xml: str) -> str | None:
    """Where a guest's NVRAM is on its host; None: it has none, or not as a file."""
    return path_of(domain_xml.tree(xml, "domain"))


def tpm(xml: str, uuid: str) -> str | None:
    """The folder with the state of a guest's TPM on its host; None: it has no emulated one, or
    its state is at a place of its own."""
    node = domain_xml.tree(xml, "domain").find("devices/tpm")
    if node is None or node.find("backend[@type='emulator']") is None or tpm_elsewhere(node):
        return None
    return str(_TPM_FOLDER / uuid)


def tpm_elsewhere(node: ET.Element) -> str | None:
    """Where the state of a TPM is that the operator put at a place of its own (libvirt 10.10)."""
    source = node.find("backend/source")
    return None if source is None else source.get("path") or "a place of its own"


def own_nvram(xml: str, name: str) -> str:
    """A definition with NVRAM of its own, beside the one it names; as it is if it names none."""
    path = nvram(xml)
    if path is None:
        return xml
    root = domain_xml.tree(xml, "domain")
    node = root.find("os/nvram")
    assert node is not None
    own = str(PurePosixPath(path).with_name(f"{name}_VARS{PurePosixPath(path).suffix}"))
    if (source := node.find("source")) is not None:
        source.set("file", own)
    else:
        node.text = own
    return ET.tostring(root, encoding="unicode")


def places(names: Iterable[str], xml: str, uuid: str) -> dict[str, str]:
    """Where a snapshot's small files go on the host where the guest is to be `xml`.

    Raises ValueError for a name that nobody gives.
    """
    found = {}
    for name in names:
        kind, _, rest = name.partition("/")
        where = nvram(xml) if kind == NVRAM else tpm(xml, uuid) if kind == TPM else None
        parts = PurePosixPath(rest).parts
        if where is None or ".." in parts or rest.startswith("/") or (kind == NVRAM) == bool(rest):
            raise ValueError(f"it has a file {name!r}, for which the guest has no place")
        found[name] = str(PurePosixPath(where, *parts))
    return found


def there(xml: str, uuid: str) -> bool:
    """Whether a guest has any of it."""
    return nvram(xml) is not None or tpm(xml, uuid) is not None


def read(xml: str, uuid: str, host: str) -> Mapping[str, bytes]:
    """All of them, of a paused guest; on its host. Raises HypervisorError.

    QEMU and the TPM's program own these directories, so no link in them is followed.
    """
    path, folder = nvram(xml), tpm(xml, uuid)
    found: dict[str, bytes] = {}
    try:
        if path is not None and Path(path).exists():  # it is made when the guest first starts
            found[NVRAM] = _content(opened(Path(path)), path, host)
        if folder is not None and Path(folder).exists():
            found |= {f"{TPM}/{name}": data for name, data in _below(Path(folder), host)}
    except OSError as exc:
        text = f"{host}: {exc.filename}: {exc.strerror}"
        hint = exc.hint if isinstance(exc, FileRefused) else None
        raise HypervisorError(text, host=host, hint=hint) from exc
    return found


def _below(top: Path, host: str) -> Iterator[tuple[str, bytes]]:
    """The regular files of a TPM, by their paths in its folder."""
    left = _MOST
    with Folder(top) as folder, folder.listed() as listed:
        for inside, file in _files(listed, ""):
            content = _content(file, str(top / inside), host)
            left -= len(content)
            if left < 0:
                raise HypervisorError(f"{host}: {top} is too large for a snapshot", host=host)
            yield inside, content


def _files(at: int, below: str) -> Iterator[tuple[str, int]]:
    """All regular files in a directory and below, open, with their paths in it. Raises OSError.

    Not by os.fwalk, which in Python 3.11 waits for ever at a FIFO that its owner has put in the
    place of a directory meanwhile.
    """
    for name in sorted(os.listdir(at)):
        inside = f"{below}{name}"
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            if inside.count("/") >= _DEEPEST:
                raise OSError(errno.ENAMETOOLONG, "too many directories in each other", inside)
            inner = os.open(name, _FOLDER, dir_fd=at)
            try:
                yield from _files(inner, f"{inside}/")
            finally:
                os.close(inner)
        elif stat.S_ISREG(mode) and name != ".lock":
            yield inside, os.open(name, _READ, dir_fd=at)


def _content(file: int, path: str, host: str) -> bytes:
    with os.fdopen(file, "rb") as content:
        seen = os.fstat(file)
        if not stat.S_ISREG(seen.st_mode):
            raise HypervisorError(f"{host}: {path} is no regular file", host=host)
        if seen.st_size > _LARGEST:
            raise HypervisorError(f"{host}: {path} is too large for a snapshot", host=host)
        return content.read(_LARGEST)
