"""Build the file system of Debian guests once, and cache it.

debootstrap fetches the packages from the mirror that apt uses on this machine, and
assets/debian-setup sets the system up. The result is one ext4 file system without partitions, which
the kernel beside it boots directly: under TCG, a boot through GRUB takes minutes.
"""

import hashlib
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import plan
from vmckpt_lab.guest_image import held
from vmckpt_lab.lab import Say, silent
from vmckpt_lab.shell import run

SUITE = "bookworm"
PACKAGES = (
    "systemd-sysv", "dbus", "udev", "iproute2", "initramfs-tools", "linux-image-cloud-amd64",
    "qemu-guest-agent", "postgresql", "postgresql-contrib", "openssh-server", "openssl",
)  # fmt: skip
TOOLS = ("debootstrap", "virt-install")
_BRANCHES = 2
_SIZE = "3G"
_SCRIPT = "debian-setup"


@dataclass(frozen=True, slots=True)
class DebianImage:
    """The files that a Debian guest boots from. Guests write to overlays of `disk`."""

    disk: Path
    """The file system, a qcow2 image."""
    kernel: Path
    initrd: Path


def recipe() -> str:
    """Return a text with everything that determines the image, except the versions of packages."""
    script = (resources.files("vmckpt_lab") / "assets" / _SCRIPT).read_text()
    return "\n".join((SUITE, *PACKAGES, str(_BRANCHES), _SIZE, script))


def key(made_of: str) -> str:
    """Return the name of an image's directory in the cache. `made_of`: the result of `recipe`."""
    return hashlib.sha256(made_of.encode()).hexdigest()[:16]


def prepare(say: Say = silent) -> DebianImage:
    """Return the image, from the cache if it is there. Building it takes minutes. Raises LabError.

    Images of earlier recipes stay in the cache: guests of other labs may use them.
    """
    cache = plan.CACHE / "debian"
    missing = [name for name in TOOLS if shutil.which(name) is None]
    if missing:
        raise LabError(
            f"{' and '.join(missing)} must be installed for a Debian guest",
            hint="run apt-get install debootstrap virtinst",
        )
    with held(cache):
        folder = cache / key(recipe())
        if not folder.exists():
            began = time.monotonic()
            say("debian: building the image, once; this takes a few minutes")
            _build(cache, folder, say)
            say(f"debian: built in {time.monotonic() - began:.0f} s; it is kept in {cache}")
    return DebianImage(folder / "disk.qcow2", folder / "vmlinuz", folder / "initrd.img")


def _build(cache: Path, final: Path, say: Say) -> None:
    with tempfile.TemporaryDirectory(dir=cache) as scratch:
        work = Path(scratch)
        work.chmod(0o755)
        tree, made = work / "tree", work / "made"
        made.mkdir()
        say(f"debian: fetching and unpacking packages of {SUITE}")
        _bootstrap(tree)
        say("debian: setting up systemd and PostgreSQL")
        _set_up(tree)
        for name in ("vmlinuz", "initrd.img"):
            shutil.copy(tree / "boot" / name, made / name)
            (made / name).chmod(0o644)
        shutil.copy(tree / "var/lib/dpkg/status", made / "packages")
        say("debian: writing the disk image")
        run(["mke2fs", "-q", "-t", "ext4", "-d", str(tree), str(work / "disk.raw"), _SIZE])
        raw, disk = str(work / "disk.raw"), str(made / "disk.qcow2")
        run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, disk])
        made.rename(final)


def _bootstrap(tree: Path) -> None:
    words = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    _apart([*words, SUITE, str(tree), mirror()], "the Debian packages could not be fetched")


def mirror() -> str:
    """Return the address of the Debian mirror that apt uses on this machine. Raises LabError."""
    wanted = ["Created-By: Packages", "Label: Debian"]
    found = run(["apt-get", "indextargets", "--format", "$(REPO_URI)", *wanted], check=False)
    if not found:
        raise LabError("apt knows no mirror of Debian", hint="run apt-get update")
    return found.split()[0].rstrip("/")


def _set_up(tree: Path) -> None:
    script = tree / _SCRIPT
    script.write_bytes((resources.files("vmckpt_lab") / "assets" / _SCRIPT).read_bytes())
    inside = f"mount -t proc proc {tree}/proc && exec chroot {tree} sh /{_SCRIPT} {_BRANCHES}"
    _apart(["sh", "-c", inside], "the Debian guest could not be set up")
    script.unlink()


def _apart(words: list[str], failure: str) -> None:
    """Run a command in its own mount and PID namespaces, so that it leaves no process or mount
    behind.

    `failure`: the beginning of the error. Raises LabError with one line if the command fails, and
    writes its output to a file.
    """
    apart = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *words]
    done = subprocess.run(
        apart, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode != 0:
        kept = plan.CACHE / "debian/failed.log"
        kept.write_text(done.stdout)
        last = (done.stdout.strip() or "no message").splitlines()[-1].strip()
        hint = f"run apt-get update and try again; {kept} has all messages"
        raise LabError(f"{failure}: {last}", hint=hint)
