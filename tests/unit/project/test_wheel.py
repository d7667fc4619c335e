"""What `pipx install` makes of this: everything that is needed is in the wheel."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.support.paths import ROOT

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment: our wheel alone is new there, its dependencies are this
    environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    # A copy: building leaves folders beside the sources.
    source = folder / "source"
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, source], check=True)
    subprocess.run(
        [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True
    )
    made = folder / "venv"
    venv.create(made, with_pip=False)
    own = sysconfig.get_path("purelib", "venv", {"base": str(made)})
    (wheel,) = folder.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", own, wheel], check=True)
    # The editable install of this checkout must not stand in for what the wheel lacks.
    theirs = Path(sysconfig.get_path("purelib"))
    others = folder / "others"
    others.mkdir()
    for one in theirs.iterdir():
        if "vmckpt" not in one.name:
            (others / one.name).symlink_to(one)
    (Path(own) / "others.pth").write_text(f"{others}\n")
    return made / "bin/python"


def ran(installed: Path, *words: str, folder: Path) -> str:
    program = "import sys; from vmckpt.cli.__main__ import main; sys.argv[0] = 'vmckpt'; main()"
    clean = {key: value for key, value in os.environ.items() if not key.startswith("VMCKPT")}
    done = subprocess.run(
        [installed, "-c", program, *words], cwd=folder, capture_output=True, text=True, check=False,
        env=clean | {"VMCKPT_STATE": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_policies_its_lab_and_its_dashboard_came_along(installed: Path, tmp_path: Path) -> None:
    assert ran(installed, "--version", folder=tmp_path).startswith("vmckpt ")
    names = {
        one["name"]
        for one in json.loads(ran(installed, "policy", "list", "--json", folder=tmp_path))
    }
    assert {"balanced", "maintenance", "busy"} <= names
    assert "prover.c" in {
        one.name
        for one in (installed.parents[1]).glob("lib/python*/site-packages/vmckpt_lab/assets/*")
    }
    assert "--simulate" in ran(installed, "dashboard", "--help", folder=tmp_path)
    program = "import vmckpt_tui.app, vmckpt.agent.main, vmckpt.monitor.prometheus, vmckpt_lab.lab"
    subprocess.run([installed, "-c", program], check=True, cwd=tmp_path)


def test_every_room_of_the_checkout_is_in_it(installed: Path) -> None:
    (site,) = (installed.parents[1]).glob("lib/python*/site-packages")
    ours = {one.relative_to(ROOT / "vmckpt") for one in (ROOT / "vmckpt").rglob("*.py")}
    theirs = {one.relative_to(site / "vmckpt") for one in (site / "vmckpt").rglob("*.py")}
    tracked = subprocess.run(
        ["git", "ls-files", "vmckpt"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    wanted = {one for one in ours if f"vmckpt/{one}" in tracked}
    assert wanted - theirs == set()
