"""Small bundles, and the installer run as a host does."""

import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import pytest

from vmckpt import __version__
from vmckpt.agent import bundle
from vmckpt.agent.bundle import Bundle

# The interpreter that this environment was made with: it has nothing of ours by itself.
BARE = str(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
MAIN = f"""\
import sys, time
if sys.argv[1:2] == ["--version"]:
    print("{__version__}")
else:
    print("started", flush=True)
    time.sleep(600)
"""


def small(folder: Path, mark: str = "", main: str = MAIN) -> Bundle:
    """A bundle whose agent only says its version, or sleeps."""
    package = folder / f"small{mark}"
    files = {"vmckpt/__init__.py": f"# {mark}\n", "vmckpt/agent/__init__.py": "",
             "vmckpt/agent/main.py": main}  # fmt: skip
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    return bundle.made_of({f"site/{name}": package / name for name in files})


def words(
    folder: Path, made: Bundle, *, size: int = 0, program: str = "import vmckpt"
) -> list[str]:
    """What starts the installer."""
    text = resources.files("vmckpt.remote.scripts").joinpath("install_agent.py").read_text()
    head = ["env", "-i", BARE, "-I", "-c", text]
    return [*head, str(folder), made.name, made.digest, str(size), program]


def install(
    folder: Path, made: Bundle, *, data: bytes | None = None, before: Sequence[str] = (),
    size: int = 0, program: str = "import vmckpt",
) -> subprocess.CompletedProcess[bytes]:  # fmt: skip
    """Run the installer to its end."""
    data = bundle.archive(made).read_bytes() if data is None else data
    return subprocess.run(
        [*before, *words(folder, made, size=size, program=program)], input=data,
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip


def installed(folder: Path) -> list[str]:
    """The versions that are taken for whole."""
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


def drafts(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] == ".")


def started(folder: Path, made: Bundle) -> "subprocess.Popen[bytes]":
    """An agent that runs from there until it is ended."""
    process = subprocess.Popen([folder / made.name / "bin/vmckpt-agent"], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"started\n"
    return process


def ended(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


@pytest.fixture
def versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host's folder of versions; archives are kept in a place of the test's own."""
    monkeypatch.setenv("VMCKPT_STATE", str(tmp_path / "state"))
    return tmp_path / "agent-versions"
