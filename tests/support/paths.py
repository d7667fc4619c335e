"""Where things of this project are, whatever directory a test is in."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/fixtures"
TRACES = ROOT / "tests/scenarios/traces"
