"""Root file systems of other distributions, in which packages are installed."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT
from vmckpt_lab.debian import image

KEPT = ROOT / "build/roots"
UBUNTU = "http://archive.ubuntu.com/ubuntu"
SUITES = ("bookworm", "trixie", "noble", "resolute")
"""Debian 12 and 13, Ubuntu 24.04 and 26.04."""
OF_UBUNTU = ("noble", "resolute")
DEBIAN_KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
UBUNTU_KEYS = f"{ROOT}/build/packages/trixie/usr/share/keyrings/ubuntu-archive-keyring.gpg"
IN_ROOT = """\
mount -t proc proc "$0/proc" && mount -t tmpfs tmpfs "$0/dev/shm" &&
exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive "$@"
"""


@dataclass(frozen=True)
class Root:
    """A root file system."""

    path: Path

    def run(self, *words: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
        """Run a command in it, with a /proc of its own."""
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", IN_ROOT,
             str(self.path), *words],
            input=stdin, capture_output=True, check=False, timeout=600,
        )  # fmt: skip

    def good(self, *words: str, stdin: bytes | None = None) -> str:
        """Run a command that has to succeed. Returns its output."""
        done = self.run(*words, stdin=stdin)
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
        return done.stdout.decode()

    def install(self, package: Path) -> str:
        """Install a package with apt, and what it depends on. Returns all output."""
        shutil.copy(package, self.path / "root")
        done = self.run("apt-get", "install", "-y", "--no-install-recommends",
                        f"/root/{package.name}")  # fmt: skip
        assert done.returncode == 0, (done.stdout + done.stderr).decode()[-4000:]
        return (done.stdout + done.stderr).decode()


def archive(suite: str) -> Path:
    """Make a minimal root file system with debootstrap, unless it is kept. Returns its archive."""
    kept = KEPT / f"{suite}.tar"
    if kept.exists():
        return kept
    KEPT.mkdir(parents=True, exist_ok=True)
    new = KEPT / f"{suite}.{os.getpid()}"
    ubuntu = suite in OF_UBUNTU
    origin = UBUNTU if ubuntu else image.mirror()
    # The script for all releases of a distribution, since debootstrap may not know the newest.
    keys, script = (UBUNTU_KEYS, "gutsy") if ubuntu else (DEBIAN_KEYS, "sid")
    try:
        done = subprocess.run(
            ["debootstrap", "--variant=minbase", f"--keyring={keys}",
             "--include=python3,ca-certificates", suite, str(new), origin, script],
            capture_output=True, text=True, check=False, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        # Packages must not start services in a root file system.
        (new / "usr/sbin/policy-rc.d").write_text("#!/bin/sh\nexit 101\n")
        (new / "usr/sbin/policy-rc.d").chmod(0o755)
        if ubuntu:
            components = f"deb {UBUNTU} {suite} main universe\n"
            (new / "etc/apt/sources.list").write_text(components)
            Root(new).good("apt-get", "-q", "update")
        subprocess.run(["tar", "-C", new, "-cf", f"{kept}.new", "."], check=True)
        Path(f"{kept}.new").rename(kept)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return kept


@contextmanager
def root(suite: str, folder: Path) -> Iterator[Root]:
    """Provide a copy of a root file system, and delete it afterwards."""
    at = folder / suite
    at.mkdir()
    subprocess.run(["tar", "-C", at, "-xf", archive(suite)], check=True)
    shutil.copy("/etc/resolv.conf", at / "etc/resolv.conf")
    try:
        yield Root(at)
    finally:
        shutil.rmtree(at)
