"""Ansible's own checks of the collection."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.long
PROGRAMS = Path(sys.executable).parent


def test_ansible_finds_nothing_wrong_with_the_collection(tmp_path: Path) -> None:
    at = tmp_path / "ansible_collections/vmckpt/vmckpt"
    shutil.copytree(ROOT / "ansible", at)
    subprocess.run(["git", "init", "-q", at], check=True)
    subprocess.run(["git", "-C", at, "add", "."], check=True)
    cache = tmp_path / "home/.ansible/test/cache"
    cache.mkdir(parents=True)
    # ansible-test would download a script that installs pip.
    (cache / "get_pip_24_2.py").write_text("import ensurepip\nensurepip.bootstrap()\n")
    own = {"PATH": f"{PROGRAMS}:/usr/bin:/bin", "HOME": str(tmp_path / "home"),
           "ANSIBLE_HOME": str(tmp_path / "home/.ansible")}  # fmt: skip
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    done = subprocess.run(
        [PROGRAMS / "ansible-test", "sanity", "--python", version, "--color", "no"],
        cwd=at, env=os.environ | own, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_the_collection_can_be_built(tmp_path: Path) -> None:
    subprocess.run(
        [PROGRAMS / "ansible-galaxy", "collection", "build", ROOT / "ansible", "--output-path",
         tmp_path],
        check=True, capture_output=True, env=os.environ | {"ANSIBLE_HOME": str(tmp_path / "home")},
    )  # fmt: skip
    assert [one.name for one in tmp_path.glob("*.tar.gz")] == ["vmckpt-vmckpt-0.1.0.tar.gz"]
