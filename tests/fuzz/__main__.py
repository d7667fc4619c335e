"""Fuzz a target: python -m tests.fuzz TARGET --seconds N [--seed S]."""

import argparse
import sys

from tests.fuzz.run import run
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run one target; 1 if something was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    options.add_argument("target", choices=sorted(TARGETS))
    options.add_argument("--seconds", type=int, default=60)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    result = run(given.target, given.seconds, seed=given.seed)
    if result.findings:
        sys.stdout.write(result.text + "\n")
    sys.stdout.write(
        f"{result.target}: {result.executions} executions, {result.per_second} per second,"
        f" {result.memory} MiB, {len(result.findings)} findings\n"
    )
    return 1 if result.findings else 0


if __name__ == "__main__":
    sys.exit(main())
