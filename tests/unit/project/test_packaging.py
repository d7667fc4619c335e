"""What others' programs read of ours: systemd, Prometheus, Grafana."""

import json
import re
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from tests.support.metrics import NOW_STANDING, REPORT, ended, happened
from tests.support.paths import ROOT
from tests.tui.still import FLEET
from vmckpt.model.guest import Copies
from vmckpt.monitor.prometheus import Exporter

PACKAGING = ROOT / "packaging"
UNIT = PACKAGING / "systemd/vmckpt.service"
_METRIC = re.compile(r"\bvmckpt_[a-z_]+\b")


def told() -> set[str]:
    """The names of all series that there can be."""
    exporter = Exporter()
    twice = Copies(guest="web1", uuid="u-1", hosts=("alpha", "beta"))
    exporter.now = replace(NOW_STANDING, fleet=replace(FLEET, copies=(twice,)))
    exporter.take(ended("completed", report=REPORT))
    exporter.take(happened("decided", {"action": "throttle", "rule": "grow"}))
    exporter.told("took")
    return {one.name for family in exporter.registry.collect() for one in family.samples}


def test_alerts_and_panels_ask_for_what_there_is() -> None:
    rules = yaml.safe_load((PACKAGING / "prometheus/alerts.yaml").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    panels = json.loads((PACKAGING / "grafana/vmckpt.json").read_text())["panels"]
    asked += [target["expr"] for panel in panels for target in panel["targets"]]
    names = {name for expression in asked for name in _METRIC.findall(expression)}

    assert len(names) > 20
    assert names - told() == set()


def test_what_there_is_stands_in_the_docs() -> None:
    text = (PACKAGING.parent / "docs/monitoring.md").read_text()
    full = set(_METRIC.findall(text))
    ends = {one[1:] for one in re.findall(r"…_[a-z_]+", text)}
    plain = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for name in told()
        if not name.endswith("_created")
    }
    lacking = {
        name for name in plain - {"vmckpt_build_info"}
        if name not in full and not any(name.endswith(end) for end in ends)
    }  # fmt: skip
    assert lacking == set()


def test_every_alert_says_what_to_run() -> None:
    rules = yaml.safe_load((PACKAGING / "prometheus/alerts.yaml").read_text())
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert re.search(r"vmckpt|systemctl|journalctl", rule["annotations"]["mend"]), rule["alert"]


def test_promtool_finds_the_rules_good_and_they_fire_when_they_should() -> None:
    promtool = shutil.which("promtool", path=f"{PACKAGING.parent}/.tools/usr/bin:/usr/bin")
    assert promtool is not None, "./check --install fetches it"
    tests = ["alerts-test.yaml", "alerts-days-test.yaml"]
    for words in (["check", "rules", "alerts.yaml"], ["test", "rules", *tests]):
        done = subprocess.run(
            [promtool, *words], cwd=PACKAGING / "prometheus", capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("words", [("verify",), ("security", "--offline=true", "--threshold=60")])
def test_systemd_finds_the_unit_good(words: tuple[str, ...], tmp_path: Path) -> None:
    # There need not be a /usr/local/bin/vmckpt on this machine.
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/usr/local/bin/vmckpt", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", *words, str(unit)], capture_output=True, text=True, check=False
    )
    mine = [line for line in done.stderr.splitlines() if "vmckpt.service" in line]
    assert (done.returncode, mine) == (0, []), done.stdout[-3000:] + done.stderr


def pinned(name: str) -> dict[str, str]:
    """Each package of a lock file with its version and hashes."""
    text = (PACKAGING.parent / name).read_text().replace("\\\n", "")
    lines = [line for line in text.splitlines() if "==" in line]
    return {line.partition("==")[0]: line for line in lines}


def test_who_only_runs_it_gets_the_versions_that_are_tested() -> None:
    tested, run = pinned("requirements.lock"), pinned("requirements-run.lock")
    project = tomllib.loads((PACKAGING.parent / "pyproject.toml").read_text())["project"]
    wanted = {re.split(r"[\[<>=]", one)[0].lower() for one in project["dependencies"]}

    assert wanted | {"setuptools"} <= run.keys()
    assert run.items() <= tested.items()
