"""Build the kernel and initramfs of lab guests once for each kernel package, and cache them.

The kernel is Debian's cloud kernel, unpacked but not installed. The initramfs contains busybox, the
virtio drivers and the prover, which is compiled on this machine.
"""

import fcntl
import hashlib
import lzma
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab.plan import CACHE
from vmckpt_lab.shell import run

BUSYBOX = Path("/bin/busybox")
# Drivers, in the order in which they must be loaded. Some of them may be built into the kernel.
MODULES = (
    "virtio_ring",
    "virtio",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_blk",
    "failover",
    "net_failover",
    "virtio_net",
)
_SCRIPTS = ("init", "network")


@dataclass(frozen=True, slots=True)
class Image:
    """The files that a lab guest boots from."""

    kernel: Path
    initramfs: Path


def kernel_package() -> str:
    """Return the kernel package that linux-image-cloud-amd64 currently depends on.

    Raises LabError if apt does not know linux-image-cloud-amd64.
    """
    answer = run(["apt-cache", "depends", "linux-image-cloud-amd64"])
    for line in answer.splitlines():
        word = line.strip().removeprefix("Depends: ")
        if word.startswith("linux-image-") and word != "linux-image-cloud-amd64":
            return word
    raise LabError("apt does not know linux-image-cloud-amd64", hint="run apt-get update")


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock a cache directory, so that only one lab fills it. Creates the directory if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                # Python resumes a blocking flock after a signal, so Ctrl-C would have to wait.
                time.sleep(0.02)
        yield


def prepare() -> Image:
    """Return the image with the newest cached kernel. Builds missing files. Raises LabError."""
    with held(CACHE / "guest"):
        return _prepared(CACHE / "guest")


def _prepared(folder: Path) -> Image:
    kept = sorted(folder.glob("linux-image-*/vmlinuz"), key=lambda p: p.stat().st_mtime)
    kernel = kept[-1] if kept else _fetch_kernel(folder, kernel_package())
    source = resources.files("vmckpt_lab") / "assets"
    stamp = hashlib.sha256(
        b"".join(source.joinpath(name).read_bytes() for name in ("prover.c", *_SCRIPTS))
        + " ".join(MODULES).encode()
    ).hexdigest()[:12]
    initramfs = kernel.parent / f"initramfs-{stamp}.cpio"
    if not initramfs.exists():
        _build_initramfs(kernel.parent, initramfs)
    return Image(kernel, initramfs)


def _fetch_kernel(folder: Path, package: str) -> Path:
    """Download a kernel package and unpack it below `folder`. Returns the path of the kernel.

    The package's directory appears complete or not at all. Raises LabError.
    """
    with tempfile.TemporaryDirectory(dir=folder) as work:
        subprocess.run(["chmod", "755", work], check=True)
        done = subprocess.run(
            ["apt-get", "download", package], cwd=work, capture_output=True, text=True, check=False
        )
        packages = list(Path(work).glob("*.deb"))
        if done.returncode != 0 or not packages:
            raise LabError(f"apt-get download {package} failed", hint="run apt-get update")
        run(["dpkg", "-x", str(packages[0]), f"{work}/tree"])
        built = Path(work, "built")
        built.mkdir()
        shutil.move(next(Path(work, "tree/boot").glob("vmlinuz-*")), built / "vmlinuz")
        modules = next(p for p in Path(work, "tree").glob("**/lib/modules/*") if p.is_dir())
        shutil.move(modules, built / "modules")
        built.rename(folder / package)
    return folder / package / "vmlinuz"


def _build_initramfs(kernel_folder: Path, final: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        root = Path(work, "root")
        for name in ("bin", "proc", "sys", "dev", "modules"):
            (root / name).mkdir(parents=True)
        shutil.copy(BUSYBOX, root / "bin/busybox")
        assets = resources.files("vmckpt_lab") / "assets"
        for name in _SCRIPTS:
            (root / name).write_bytes(assets.joinpath(name).read_bytes())
            (root / name).chmod(0o755)
        (root / "modules/order").write_text(
            "".join(f"{name}.ko\n" for name in _copy_modules(kernel_folder, root / "modules"))
        )
        _compile(Path(work), root / "prover")
        _pack(root, final)


def _copy_modules(kernel_folder: Path, target: Path) -> list[str]:
    builtin = (kernel_folder / "modules/modules.builtin").read_text()
    copied = []
    for name in MODULES:
        found = list((kernel_folder / "modules").glob(f"**/{name}.ko*"))
        if found:
            content = found[0].read_bytes()
            if found[0].suffix == ".xz":
                content = lzma.decompress(content)
            (target / f"{name}.ko").write_bytes(content)
            copied.append(name)
        elif f"/{name}.ko" not in builtin:
            raise LabError(f"the guest kernel has no driver {name}")
    return copied


def _compile(work: Path, target: Path) -> None:
    source = work / "prover.c"
    source.write_bytes((resources.files("vmckpt_lab") / "assets/prover.c").read_bytes())
    run(
        [
            "gcc",
            "-O2",
            "-Wall",
            "-Wextra",
            "-static",
            "-pthread",
            "-s",
            str(source),
            "-o",
            str(target),
        ]
    )


def _pack(root: Path, final: Path) -> None:
    names = "".join(
        f"{path.relative_to(root)}\0" for path in [root, *sorted(root.rglob("*"))]
    ).encode()
    packed = subprocess.run(
        ["cpio", "--null", "--create", "--format=newc", "--owner=0:0", "--quiet"],
        input=names,
        cwd=root,
        capture_output=True,
        check=True,
    )
    partial = final.with_suffix(f".{os.getpid()}")
    # Not compressed: without KVM, decompression would add half a second to each guest's start.
    partial.write_bytes(packed.stdout)
    partial.rename(final)
