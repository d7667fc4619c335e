"""Firmware state: NVRAM and the state of an emulated TPM, as small files on the guest's host.

In a snapshot, the NVRAM is named "nvram", and the files of the TPM are named "tpm/…".
"""

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import definition_text, domain_xml
from vmckpt.hypervisor.domain_xml import path_of
from vmckpt.units import show_bytes
from vmckpt.util.host_files import FileRefused, Folder, opened

NVRAM, TPM = "nvram", "tpm"
_TPM_FOLDER = PurePosixPath("/var/lib/libvirt/swtpm")
# A manifest can contain at most 64 MiB of firmware files.
_LARGEST, _MOST = 32 << 20, 64 << 20
_DEEPEST = 8
_FOLDER = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def nvram(xml: str) -> str | None:
    """Return the path of a guest's NVRAM on its host; None if it has no file-backed NVRAM.

    Raises ValueError if the XML is invalid.
    """
    return path_of(domain_xml.tree(xml, "domain"))


def tpm(xml: str, uuid: str) -> str | None:
    """Return the directory of a guest's TPM state on its host.

    Returns None if the guest has no emulated TPM, or if its definition sets another path. Raises
    ValueError if the XML is invalid.
    """
    node = domain_xml.tree(xml, "domain").find("devices/tpm")
    if node is None or node.find("backend[@type='emulator']") is None or tpm_elsewhere(node):
        return None
    return str(_TPM_FOLDER / uuid)


def tpm_elsewhere(node: ET.Element) -> str | None:
    """Return the TPM's state path that the definition sets (libvirt 10.10); None if it sets none.

    A definition can set another kind of place: then the result is "a custom location".
    """
    source = node.find("backend/source")
    return None if source is None else source.get("path") or "a custom location"


def own_nvram(xml: str, name: str) -> str:
    """Return the definition with the path of a new NVRAM file in the same directory.

    `name`: the guest's name, after which the file is named. A definition without NVRAM is returned
    unchanged. Raises ValueError if the XML is invalid.
    """
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
    return definition_text.text(root, xml)


def places(names: Iterable[str], xml: str, uuid: str) -> dict[str, str]:
    """Return the path on the host for each of a snapshot's firmware files.

    `xml`, `uuid`: the guest's definition and UUID. Raises ValueError for a name that does not match
    the guest, or if the XML is invalid.
    """
    found = {}
    for name in names:
        kind, _, rest = name.partition("/")
        where = nvram(xml) if kind == NVRAM else tpm(xml, uuid) if kind == TPM else None
        parts = PurePosixPath(rest).parts
        if where is None or ".." in parts or rest.startswith("/") or (kind == NVRAM) == bool(rest):
            raise ValueError(
                f"the snapshot has the file {name!r}, but the guest's definition has no place for"
                " it"
            )
        found[name] = str(PurePosixPath(where, *parts))
    return found


def there(xml: str, uuid: str) -> bool:
    """Return whether a guest has NVRAM or TPM state that can be captured.

    Raises ValueError if the XML is invalid.
    """
    return nvram(xml) is not None or tpm(xml, uuid) is not None


def read(xml: str, uuid: str, host: str) -> Mapping[str, bytes]:
    """Return the content of all firmware files of a guest on this host, by name.

    The guest must be paused or off. QEMU and swtpm own the directories, so no symbolic link in them
    is followed. Raises HypervisorError, and ValueError if the XML is invalid.
    """
    path, folder = nvram(xml), tpm(xml, uuid)
    found: dict[str, bytes] = {}
    try:
        if path is not None and Path(path).exists():  # libvirt creates NVRAM at the first start
            found[NVRAM] = _content(opened(Path(path)), path, host)
        if folder is not None and Path(folder).exists():
            found |= {f"{TPM}/{name}": data for name, data in _below(Path(folder), host)}
    except OSError as exc:
        text = f"{host}: {exc.filename}: {exc.strerror}"
        hint = exc.hint if isinstance(exc, FileRefused) else None
        raise HypervisorError(text, host=host, hint=hint) from exc
    return found


def _below(top: Path, host: str) -> Iterator[tuple[str, bytes]]:
    """Yield the relative path and content of each regular file in a TPM's directory.

    Lock files are left out. Raises HypervisorError, OSError.
    """
    left = _MOST
    with Folder(top) as folder, folder.listed() as listed:
        for inside, file in _files(listed, ""):
            content = _content(file, str(top / inside), host)
            left -= len(content)
            if left < 0:
                raise HypervisorError(
                    f"{host}: the files in {top} are larger than {show_bytes(_MOST)} in total, the"
                    " limit for the TPM state in a snapshot",
                    host=host,
                )
            yield inside, content


def _files(at: int, below: str) -> Iterator[tuple[str, int]]:
    """Yield the relative path and an open descriptor of each regular file below a directory.

    Lock files are left out. os.fwalk is not used: in Python 3.11, it blocks if the directory's
    owner replaces a subdirectory with a FIFO meanwhile. Raises OSError.
    """
    for name in sorted(os.listdir(at)):
        inside = f"{below}{name}"
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
        if stat.S_ISDIR(mode):
            if inside.count("/") >= _DEEPEST:
                raise OSError(errno.ENAMETOOLONG, "too many nested directories", inside)
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
            raise HypervisorError(f"{host}: {path} is not a regular file", host=host)
        if seen.st_size > _LARGEST:
            raise HypervisorError(
                f"{host}: {path} has {show_bytes(seen.st_size)}, and the limit for one NVRAM or TPM"
                f" file in a snapshot is {show_bytes(_LARGEST)}",
                host=host,
            )
        return content.read(_LARGEST)
