"""Fuzz each parser of external data. Counts the executions and findings.

    .venv/bin/python -m bench.fuzz [--seconds 180] [--seed 1] [--only trace,policy]
        [--json bench/results/fuzz.json]

Needs the library that the "fuzz" extra installs. The targets run one after the other, on one CPU.
"""

import argparse
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.fuzz.run import HANGS, MEMORY, run
from tests.fuzz.targets import TARGETS


def main() -> None:
    """Fuzz the targets, print a table and save the numbers."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=int, default=180)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default=",".join(TARGETS))
    options.add_argument("--json", type=Path)
    given = options.parse_args()
    rows: list[dict[str, Any]] = []
    if given.json is not None and given.json.exists():
        # Keep the rows of targets that are not fuzzed again.
        rows = json.loads(given.json.read_text())["rows"]
    for target in given.only.split(","):
        row = asdict(run(target, given.seconds, seed=given.seed))
        del row["text"]
        row["findings"] = [Path(one).name for one in row["findings"]]
        rows = [*(one for one in rows if one["target"] != target), row]
        print(
            f"{target:<13} {row['executions']:>9} executions {row['per_second']:>7}/s"
            f" {row['memory']:>5} MiB {len(row['findings'])} findings",
            flush=True,
        )
        if given.json is not None:
            told = {
                "python": platform.python_version(),
                "a finding is": f"any exception, {HANGS} s for one input, or {MEMORY} MiB",
                "rows": rows,
            }
            given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
