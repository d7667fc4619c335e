"""Fleets that a file describes, and plans for them."""

import json
import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from vmckpt.app import evacuation
from vmckpt.cli import app
from vmckpt.errors import BadInput
from vmckpt.evacuation.task import Kind, Task
from vmckpt.simulation import fleet_file
from vmckpt.units import GIB

PAGE = ROOT / "docs/evacuation.md"


def written(folder: Path, text: str) -> Path:
    path = folder / "fleet.yaml"
    path.write_text(textwrap.dedent(text))
    return path


def test_what_the_page_shows_can_be_read(tmp_path: Path) -> None:
    shown = PAGE.read_text().partition("```yaml\nhosts:\n")[2].partition("```")[0]
    fleet = fleet_file.load(written(tmp_path, f"hosts:\n{shown}"), 4.0)
    assert [one.name for one in fleet.places][::20] == ["h01", "h21", "spare"]
    assert (fleet.places[0].memory, fleet.places[0].cpus) == (512 * GIB, 256)
    assert fleet.places[0].link == 25_000_000_000 / 8
    homes = [one.host for one in fleet.tenants]
    assert (homes.count("h01"), homes.count("h10"), homes.count("h11")) == (20, 20, 1)
    assert fleet.tenants[-1].stays == "it holds a GPU"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("hosts: []", "must not be empty"),
        ("hosts: [{name: h1, memory: 1GiB}]", "cpus is missing"),
        ("hosts: [{name: h1, memory: big, cpus: 1}]", "big"),
        ('hosts: [{name: "h[9-1]", memory: 1GiB, cpus: 1}]', "is an empty range, or too large"),
        ('hosts: [{name: "h[1", memory: 1GiB, cpus: 1}]', "use a name like"),
        ("hosts: [{name: h1, memory: 1GiB, cpus: 1, lnk: 1gbit}]", "lnk"),
        (
            "hosts: [{name: h1, memory: 1GiB, cpus: 1}, {name: h1, memory: 1GiB, cpus: 1}]",
            "host 'h1' occurs twice",
        ),
        (
            "hosts: [{name: h1, memory: 1GiB, cpus: 1}]\n"
            "guests: [{name: a, host: h2, memory: 1GiB}]",
            "no host 'h2'; known: h1",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(BadInput) as caught:
        fleet_file.load(path, 1.0)
    assert str(path) in str(caught.value)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


TWO = "hosts:\n- {name: h1, memory: 8GiB, cpus: 4}\n- {name: h2, memory: 8GiB, cpus: 4}\n"


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        (f"{TWO}guests:\n- {{name: a, host: h9, memory: 1GiB}}\n", 5, "no host 'h9'"),
        (f"{TWO}- {{name: h2, memory: 1GiB, cpus: 1}}\n", 4, "host 'h2' occurs twice"),
        (
            f"{TWO}guests:\n- {{name: b, host: h1, memory: 1GiB}}\n"
            '- name: "[a-b]"\n  host: h1\n  memory: 1GiB\n',
            6, "is not a name",
        ),
        (
            f"{TWO}guests:\n- {{name: b2, host: h1, memory: 1GiB}}\n"
            '- name: "b[1-3]"\n  host: h1\n  memory: 1GiB\n',
            6, "guest 'b2' occurs twice",
        ),
        (f"{TWO}guests:\n- {{name: 5, host: h1, memory: 1GiB}}\n", 5, "put it in quotes"),
        (f"{TWO}guests:\n- {{name: a, host: h1, memory: 1GiB, vcpus: 1_0}}\n", 5, "vcpus"),
        (f"{TWO}guests:\n- {{name: a, host: h1, memory: 1:00}}\n", 5, "memory"),
    ],
)  # fmt: skip
def test_every_mistake_names_its_line(tmp_path: Path, text: str, line: int, why: str) -> None:
    path = tmp_path / "fleet.yaml"
    path.write_text(text)
    with pytest.raises(BadInput) as caught:
        fleet_file.load(path, 1.0)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert why in str(caught.value)


RACK = """
    hosts:
    - {name: "h[1-4]", memory: 64GiB, cpus: 32, link: 10gbit}
    guests:
    - {name: "a[1-6]", host: h1, memory: 8GiB, vcpus: 2, dirty: 20MiB/s}
    - {name: fixed, host: h1, memory: 1GiB, stays: it holds a GPU}
"""


def test_a_plan_is_made_and_played(tmp_path: Path) -> None:
    order = Task(kind=Kind.EVACUATE, host="h1")
    found = evacuation.emptied(written(tmp_path, RACK), order, None)
    assert {one.tenant.name for one in found.plan.going} == {f"a{n}" for n in range(1, 7)}
    assert [(one.tenant.name, one.why) for one in found.plan.left] == [("fixed", "it holds a GPU")]
    assert found.arrived == 6
    # 48 GiB over 10 Gbit/s, some of it twice; off by a third, and an attempt that fails.
    assert 30 < found.total.low < found.total.high < 120


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(written(tmp_path, RACK))
    assert app.run(["evacuate", "h1", "--fleet", path]) == 2
    assert "add --dry-run" in capsys.readouterr().err
    assert app.run(["evacuate", "h9", "--fleet", path, "--dry-run"]) == 2
    assert "no host 'h9'; known: h1, h2" in capsys.readouterr().err
    assert app.run(["evacuate", "h1", "--to", "h2,h1", "--fleet", path, "--dry-run"]) == 2
    assert "h1 cannot be both evacuated and a target; name other" in capsys.readouterr().err
    assert app.run(["evacuate", "h1", "--fleet", path, "--dry-run"]) == 21
    said = capsys.readouterr()
    assert "simulated 10 times, with durations varied by up to 30%" in said.out
    assert "30% and 2% of the moves failing" in said.out
    assert "at least 6 of 6 guests arrived" in said.out
    assert all(len(line) <= 80 for line in said.out.splitlines() if line.startswith("a"))
    assert "a1, a4 → h2: " in said.out
    assert "fixed: it holds a GPU" in said.err
    assert app.run(["evacuate", "h1", "--fleet", path, "--dry-run", "--json"]) == 21
    told = json.loads(capsys.readouterr().out)
    assert len(told["moves"]) == told["played"]["arrived"] == 6
