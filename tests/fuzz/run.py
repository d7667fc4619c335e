"""Fuzz one target in a process of its own, and tell what came of it."""

import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FINDINGS = HERE / "findings"
HANGS = 5
"""Seconds for one input."""
MEMORY = 1024
"""MiB for the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one run told."""

    target: str
    seed: int
    seconds: int
    executions: int
    per_second: int
    memory: int
    """MiB, the most it had."""
    findings: tuple[str, ...]
    """Files with inputs that were no good."""
    text: str
    """What the fuzzer said last."""


def run(target: str, seconds: int, *, seed: int = 1, keep: Path | None = None) -> Result:
    """Fuzz that long. Inputs that are found to be no good are kept in `keep`."""
    place = keep if keep is not None else FINDINGS / target
    place.mkdir(parents=True, exist_ok=True)
    before = set(place.iterdir())
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(CORPUS / target, folder, dirs_exist_ok=True)
        done = subprocess.run(
            [
                sys.executable, "-m", "tests.fuzz.harness", target, folder,
                f"-max_total_time={seconds}", f"-seed={seed}", f"-timeout={HANGS}",
                f"-rss_limit_mb={MEMORY}", f"-artifact_prefix={place}/", "-max_len=16384",
                "-print_final_stats=1", "-verbosity=1",
            ],
            cwd=HERE.parent.parent, capture_output=True, text=True, errors="replace", check=False,
            timeout=seconds + 120,
        )  # fmt: skip
    found = sorted(str(one) for one in set(place.iterdir()) - before)
    if not any(place.iterdir()):
        place.rmdir()
    if done.returncode != 0 and not found:
        found = [f"exited with {done.returncode}"]
    return Result(
        target=target,
        seed=seed,
        seconds=seconds,
        executions=_told(done.stderr, "number_of_executed_units"),
        per_second=_told(done.stderr, "average_exec_per_sec"),
        memory=_told(done.stderr, "peak_rss_mb"),
        findings=tuple(found),
        text="\n".join((done.stdout + done.stderr).splitlines()[-40:]),
    )


def _told(text: str, name: str) -> int:
    found = re.search(rf"stat::{name}:\s+(\d+)", text)
    return int(found[1]) if found else 0
