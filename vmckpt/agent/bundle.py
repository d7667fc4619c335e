"""The agent as one archive, built from the packages installed here, without network access.

There is a bundle for this process's version of Python, and one for each other version whose
packages are installed beside it: vmckpt's .deb and .rpm contain those of several versions.

The archive contains the launcher "bin/vmckpt-agent" and, below "site/", the files of the
distributions that the agent imports. The digest of a bundle is the SHA-256 of a line
"NAME\\0SHA-256\\n" for each file.
"""

import gzip
import hashlib
import io
import os
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path, PurePosixPath

import vmckpt
from vmckpt.agent import waiting
from vmckpt.errors import RemoteError
from vmckpt.journal.location import state_folder
from vmckpt.remote.agent_install import LAUNCHER, OURS, python_version
from vmckpt.units import Bytes

MODULES = waiting.MODULES
"""Modules that the bundle must contain."""
DISTRIBUTIONS = (
    "annotated-types", "blake3", "boto3", "botocore", "cffi", "cryptography", "jmespath",
    "libvirt-python", "numpy", "psycopg", "psycopg-binary", "pydantic", "pydantic-core",
    "python-dateutil", "s3transfer", "six", "tenacity", "typing-extensions", "typing-inspection",
    "urllib3", "zstandard",
)  # fmt: skip
"""Distributions that MODULES import, besides vmckpt itself. A test checks this list."""
_PERHAPS = {"psycopg-binary"}  # without it, psycopg uses the host's libpq
_NEVER = {"__pycache__", "tests"}
_COMPILERS = {".a", ".c", ".h", ".pxd", ".pyc", ".pyi", ".pyx"}
# botocore has data for hundreds of services; a store and its logins need only these.
_SERVICES = {"s3", "signin", "sso", "sso-oidc", "sts"}
_OTHER_PYTHONS = "zstandard/_cffi."  # a large extension module that CPython does not use
_START = b"""\
#!/bin/sh
# Starts the agent in this script's directory, and hides all other Python packages from it.
unset PYTHONPATH PYTHONHOME
export PYTHONSAFEPATH=1 PYTHONDONTWRITEBYTECODE=1
exec "${0%/*}/python3" -m vmckpt.agent.main "$@"
"""
_SITE = "site"
_WHEN = 315532800  # 1980, a fixed time, so that each build gives the same archive
_KEPT = "agents"
MARK = "vmckpt.pth"
"""The file by which a package of several Pythons adds its common directory; see scripts/vendor."""
_COMPILED = 16 << 20
_BLOCK = 4096
_KILLED = 3600.0  # seconds after which an unfinished archive is considered abandoned
_making = threading.Lock()
_LEVEL = 4  # gzip's level 6 takes twice as long, and saves only 3 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The contents of the agent's archive, for the installed version of vmckpt."""

    name: str
    python: str
    """Version of Python and processor, in the form of `OURS`."""
    digest: str
    size: Bytes
    """Size on disk once unpacked, including Python's compiled files."""
    files: Mapping[str, Path]
    """Local path of each file except the launcher, by name in the archive."""


@cache
def current() -> Bundle:
    """Return the bundle of the packages installed here, which is cached until `forget` is called.

    Raises RemoteError if a distribution is missing, and OSError.
    """
    return made_of(dict(sorted(_files(metadata.distribution))))


def for_python(tag: str) -> Bundle:
    """Return the bundle for one of `pythons`.

    Raises RemoteError if a distribution is missing, and OSError.
    """
    return current() if tag == OURS else _for_other(tag)


@cache
def _for_other(tag: str) -> Bundle:
    own = Path(sys.prefix, "lib", f"python{python_version(tag)}", "site-packages")
    folders = [str(own), str(Path(vmckpt.__file__).parents[1])]

    def find(name: str) -> metadata.Distribution:
        for found in metadata.distributions(name=name, path=folders):
            return found
        raise metadata.PackageNotFoundError(name)

    return made_of(dict(sorted(_files(find))), tag)


@cache
def pythons() -> tuple[str, ...]:
    """Return the Pythons for which there is a bundle: this process's first, then the newest first.

    Each is a version and a processor in the form of `OURS`.
    """
    marks = Path(sys.prefix, "lib").glob(f"python3.*/site-packages/{MARK}")
    minors = sorted((int(mark.parts[-3].removeprefix("python3.")) for mark in marks), reverse=True)
    tags = [OURS.replace(f"-3{sys.version_info[1]}-", f"-3{minor}-") for minor in minors]
    return tuple(dict.fromkeys((OURS, *tags)))


def made_of(files: Mapping[str, Path], tag: str = OURS) -> Bundle:
    """Return a bundle of `files`: local paths, by name in the archive. Raises OSError."""
    digests = {LAUNCHER: hashlib.sha256(_START).hexdigest()}
    size = _COMPILED
    for name, path in files.items():
        with path.open("rb") as file:
            digests[name] = hashlib.file_digest(file, "sha256").hexdigest()
        size += path.stat().st_size + _BLOCK
    text = "".join(f"{name}\0{digests[name]}\n" for name in sorted(digests))
    digest = hashlib.sha256(text.encode()).hexdigest()
    name = f"{vmckpt.__version__}-{tag}-{digest[:16]}"
    return Bundle(name=name, python=tag, digest=digest, size=Bytes(size), files=files)


def _files(find: Callable[[str], metadata.Distribution]) -> Iterator[tuple[str, Path]]:
    own = Path(vmckpt.__file__).parent
    # The directory is scanned, since an installation from a checkout has no list of its files.
    yield from _below(own, own.parent)
    for name in DISTRIBUTIONS:
        try:
            found = find(name)
        except metadata.PackageNotFoundError:
            if name not in _PERHAPS:
                raise RemoteError(
                    f"the agent cannot be sent to hosts: {name} is not installed on this machine",
                    hint="install vmckpt with all its dependencies on this machine, or install"
                    " vmckpt on the hosts",
                ) from None
            continue
        if found.files is None:  # packages of Linux distributions may lack a list of files
            for top in (found.read_text("top_level.txt") or name).split():
                yield from _of_module(top)
        for file in found.files or ():
            if is_needed(PurePosixPath(file)):
                yield f"{_SITE}/{file}", Path(str(file.locate()))


def _of_module(name: str) -> Iterator[tuple[str, Path]]:
    spec = util.find_spec(name)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield from _below(Path(folder), Path(folder).parent)
    if spec and spec.origin and not spec.submodule_search_locations:
        yield f"{_SITE}/{Path(spec.origin).name}", Path(spec.origin)


def _below(folder: Path, root: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*"):
        if path.is_file() and is_needed(inside := PurePosixPath(path.relative_to(root))):
            yield f"{_SITE}/{inside}", path


def is_needed(file: PurePosixPath) -> bool:
    """Return whether vmckpt needs a file of a distribution. `file`: path in site-packages."""
    parts = file.parts
    if parts[0] == ".." or _NEVER & set(parts) or file.suffix in _COMPILERS:
        return False
    if parts[0] in {"boto3", "botocore"} and parts[1] == "data" and len(parts) > 3:
        return parts[2] in _SERVICES
    return parts[:2] != ("vmckpt", "lab") and not str(file).startswith(_OTHER_PYTHONS)


def archive(bundle: Bundle) -> Path:
    """Build the bundle's archive unless it exists, and delete older ones for the same Python.

    Returns its path. Raises OSError.
    """
    folder = state_folder(os.environ, root=os.geteuid() == 0) / _KEPT
    path = folder / f"{bundle.name}.tar.gz"
    with _making:  # several hosts may need the archive at the same time
        if not path.exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make(bundle, path)
            for one in folder.iterdir():
                old = (
                    f"-{bundle.python}-" in one.name or one.stat().st_mtime < time.time() - _KILLED
                )
                if one != path and old:
                    one.unlink(missing_ok=True)
    return path


def _make(bundle: Bundle, path: Path) -> None:
    made, name = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(made, "wb") as file:
            _write(bundle, file)
            file.flush()
            os.fsync(file.fileno())
        Path(name).rename(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _write(bundle: Bundle, file: io.BufferedIOBase) -> None:
    with (
        gzip.GzipFile(
            fileobj=file, mode="wb", filename="", mtime=0, compresslevel=_LEVEL
        ) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        _add(tar, LAUNCHER, _START, 0o755)
        for name, path in bundle.files.items():
            _add(tar, name, path.read_bytes(), 0o644)


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode, member.mtime = len(data), mode, _WHEN
    tar.addfile(member, io.BytesIO(data))


def forget(path: Path) -> None:
    """Delete an archive that may be damaged, so that the next use rebuilds it."""
    with suppress(OSError):
        path.unlink()
    current.cache_clear()
    _for_other.cache_clear()
