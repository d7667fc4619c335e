"""The packages that ./package builds: installed, used, upgraded, removed and purged."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from tests.packages.roots import SUITES, Root, root
from tests.support.paths import ROOT
from vmckpt import __version__
from vmckpt.agent import waiting

pytestmark = pytest.mark.long
DIST = ROOT / "dist"
OWN = "/usr/lib/vmckpt"
BUNDLES = """\
import json
from vmckpt.agent import bundle
print(json.dumps([[tag, str(bundle.archive(made)), made.name, made.digest, made.size]
                  for tag in bundle.pythons() for made in [bundle.for_python(tag)]]))
"""
IMPORTED = f"import {', '.join(waiting.MODULES)}"


@pytest.fixture(scope="module")
def deb() -> Path:
    done = subprocess.run(["./package"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = DIST.glob("*.deb")
    return found


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    shutil.rmtree(tmp_path)


def earlier(deb: Path, folder: Path) -> Path:
    """The same package with a lower version, and a module that the newer one lacks."""
    tree, made = folder / "earlier", folder / "earlier.deb"
    subprocess.run(["dpkg-deb", "-R", deb, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub("(?m)^Version: .*", "Version: 0.0.1", control.read_text()))
    module = tree / f"{OWN.lstrip('/')}/any/vmckpt/former.py"
    module.write_text("")
    with (tree / "DEBIAN/md5sums").open("a") as sums:
        sums.write(f"d41d8cd98f00b204e9800998ecf8427e  {module.relative_to(tree)}\n")
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "-b", tree, made],
                   check=True, stdout=subprocess.DEVNULL)  # fmt: skip
    shutil.rmtree(tree)
    return made


def used(host: Root) -> None:
    """Use what a package has installed."""
    assert host.good("vmckpt", "--version").split()[-1] == __version__
    done = host.run("vmckpt", "hosts")
    assert done.returncode == 3, done.stderr
    assert b"hosts.yaml" in done.stderr
    assert b"Traceback" not in done.stderr
    assert "vmckpt" in host.good("getent", "group", "vmckpt", "vmckpt-look")
    assert "Move a running guest" in host.good(
        "sh", "-c", "zcat /usr/share/man/man1/vmckpt-migrate.1.gz"
    )
    assert host.good(f"{OWN}/bin/python3", "-sPc", f"{IMPORTED}; print(1)") == "1\n"
    # Everything is compiled.
    started = time.monotonic()
    host.good("vmckpt", "--help")
    assert time.monotonic() - started < 5


def bundles(host: Root) -> list[tuple[str, str, str, str, int]]:
    """The agent's bundles that a controller there can send, for each version of Python."""
    return [tuple(one) for one in json.loads(host.good(f"{OWN}/bin/python3", "-sPc", BUNDLES))]


def sent(controller: Root, host: Root, tag: str) -> None:
    """Install the agent on a host as a controller does, and start it."""
    (made,) = [one for one in bundles(controller) if one[0] == tag]
    _, path, name, digest, size = made
    text = resources.files("vmckpt.remote.scripts").joinpath("install_agent.py").read_text()
    data = (controller.path / path.lstrip("/")).read_bytes()
    host.good(
        "python3", "-I", "-c", text, "/var/lib/agent-versions", name, digest, str(size),
        IMPORTED, stdin=data,
    )  # fmt: skip
    told = host.good(f"/var/lib/agent-versions/{name}/bin/vmckpt-agent", "--version")
    assert told.strip() == __version__


@pytest.mark.parametrize("suite", SUITES)
def test_the_package_is_installed_used_and_removed(deb: Path, place: Path, suite: str) -> None:
    with root(suite, place) as host:
        host.install(deb)
        used(host)
        assert len(bundles(host)) == 4

        host.good("apt-get", "remove", "-y", "vmckpt")
        assert not (host.path / OWN.lstrip("/")).exists()
        assert host.run("vmckpt").returncode == 127
        host.good("apt-get", "purge", "-y", "vmckpt")
        assert not (host.path / "etc/vmckpt").exists()


@pytest.mark.parametrize("suite", [one for one in SUITES if one != "bookworm"])
def test_a_controller_sends_the_agent_to_hosts_with_another_python(
    deb: Path, place: Path, suite: str
) -> None:
    with root("bookworm", place) as controller, root(suite, place) as host:
        controller.install(deb)
        host.good("apt-get", "install", "-y", "--no-install-recommends", "libvirt0")
        tag = host.good(
            "python3", "-c",
            "from importlib import machinery as m; print(m.EXTENSION_SUFFIXES[0][1:-3])",
        ).strip()  # fmt: skip
        assert "311" not in tag
        sent(controller, host, tag)


def test_an_upgrade_keeps_journal_and_keys_and_no_old_module(deb: Path, place: Path) -> None:
    with root("bookworm", place) as host:
        host.install(earlier(deb, place))
        state = host.path / "var/lib/vmckpt"
        (state / "keys").mkdir(mode=0o700)
        (state / "keys/one.key").write_text("secret")
        assert (host.path / f"{OWN.lstrip('/')}/any/vmckpt/former.py").exists()

        told = host.install(deb)

        assert "0.0.1" in told
        used(host)
        left = [one.name for one in (host.path / OWN.lstrip("/")).rglob("former*")]
        assert left == []
        host.good("apt-get", "purge", "-y", "vmckpt")
        assert (state / "keys/one.key").read_text() == "secret"


def test_an_upgrade_waits_for_running_commands(deb: Path, place: Path) -> None:
    with root("bookworm", place) as host:
        host.install(earlier(deb, place))
        shutil.copy(deb, host.path / "root")
        done = host.run(
            "sh", "-c",
            f"{OWN}/bin/python3 -c 'import time; time.sleep(100)' & sleep 1;"
            f" dpkg -i /root/{deb.name}; code=$?; kill %1; exit $code",
        )  # fmt: skip
        assert done.returncode != 0
        assert b"not upgraded, because this command is running" in done.stderr
        assert "0.0.1" in host.good("dpkg-query", "-W", "vmckpt")
        host.good("vmckpt", "--version")
        host.install(deb)


def test_the_rpm_has_the_files_of_the_deb(deb: Path, place: Path) -> None:
    (rpm,) = DIST.glob("*.rpm")
    for folder in ("deb", "rpm"):
        (place / folder).mkdir()
    subprocess.run(["dpkg-deb", "-x", deb, place / "deb"], check=True)
    subprocess.run(
        ["rpm", "--root", place / "rpm", "--dbpath", "/rpmdb", "--nodeps", "--noscripts",
         "--ignorearch", "-i", rpm],
        check=True, capture_output=True,
    )  # fmt: skip
    shutil.rmtree(place / "rpm/rpmdb")
    assert listed(place / "rpm") == listed(place / "deb")
    needs = subprocess.run(["rpm", "-qp", "--requires", rpm], capture_output=True, text=True,
                           check=True).stdout  # fmt: skip
    assert "libvirt-libs" in needs


def listed(folder: Path) -> dict[str, str]:
    """Each file below a directory, with its mode and size."""
    return {
        str(path.relative_to(folder)): f"{path.lstat().st_mode:o} {path.lstat().st_size}"
        for path in folder.rglob("*")
        if not path.is_dir()
    }


@pytest.mark.parametrize("kind", ["*.whl", "*.tar.gz"])
def test_pip_alone_installs_the_wheel_and_the_sdist(deb: Path, place: Path, kind: str) -> None:
    assert deb.exists()
    (archive,) = DIST.glob(kind)
    home = place / "venv"
    subprocess.run(["/usr/bin/python3", "-m", "venv", home], check=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    subprocess.run(
        [home / "bin/pip", "install", "--quiet", archive], check=True, cwd=place, env=environment
    )
    told = subprocess.run(
        [home / "bin/vmckpt", "--version"], cwd=place, capture_output=True, text=True, check=True,
        env=environment,
    ).stdout  # fmt: skip
    assert told.split()[-1] == __version__
    assert sys.prefix not in told
