"""What a machine keeps beside its disks: NVRAM and the state of a TPM, as small files of its host.

Names in a snapshot: "nvram", and "tpm/…" for what is in the TPM's folder.
"""

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from xml.etree import ElementTree as ET

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import parse
from vmckpt.hypervisor.nvram import path_of

NVRAM, TPM = "nvram", "tpm"
_TPM_FOLDER = PurePosixPath("/var/lib/libvirt/swtpm")
# A manifest holds 64 MiB of such files.
_LARGEST = 32 << 20


def nvram(xml: str) -> str | None:
    """Where a guest's NVRAM is on its host; None: it has none, or not as a file."""
    return path_of(parse.tree(xml, "domain"))


def tpm(xml: str, uuid: str) -> str | None:
    """The folder with the state of a guest's TPM on its host; None: it has no emulated one, or
    its state is at a place of its own."""
    node = parse.tree(xml, "domain").find("devices/tpm")
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
    root = parse.tree(xml, "domain")
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
    """All of them, of a guest that stands still; on its host. Raises HypervisorError."""
    files: dict[str, Path] = {}
    path, folder = nvram(xml), tpm(xml, uuid)
    if path is not None and Path(path).exists():  # it is made when the guest first starts
        files[NVRAM] = Path(path)
    if folder is not None:
        for found in sorted(Path(folder).rglob("*")):
            if stat.S_ISREG(found.lstat().st_mode) and found.name != ".lock":
                files[f"{TPM}/{found.relative_to(folder)}"] = found
    try:
        return {name: _content(one, host) for name, one in files.items()}
    except OSError as exc:
        text = f"{host}: {exc.filename}: {exc.strerror}"
        raise HypervisorError(text, host=host) from exc


def _content(path: Path, host: str) -> bytes:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size > _LARGEST:
            raise HypervisorError(f"{host}: {path} is too large for a snapshot", host=host)
        return file.read()
