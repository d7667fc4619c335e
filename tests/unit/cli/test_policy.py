import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import GUEST, HOST
from tests.support.policies import GOOD, LEAST
from vmckpt.app import fleet
from vmckpt.cli import app
from vmckpt.inventory import Inventory
from vmckpt.model.guest import GuestState

INVENTORY = "hosts: {alpha: {uri: 'test:///default'}}\n"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> "Run":
    """Commands in an empty folder with a hosts.yaml; web1 runs on alpha and is off on beta."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VMCKPT_POLICIES", raising=False)
    (tmp_path / "hosts.yaml").write_text(INVENTORY)
    alpha = replace(HOST, labels={"rack": "a1"})
    off = replace(GUEST, state=GuestState.SHUT_OFF)
    running = replace(GUEST, labels={"tier": "web"})

    async def guests(_inventory: Inventory) -> object:
        return [(replace(HOST, name="beta"), off), (alpha, running)], {}

    monkeypatch.setattr(fleet, "guests", guests)
    return Run(capsys)


class Run:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *args: str) -> tuple[int, str, str]:
        code = app.run(["policy", *args])
        told = self._capsys.readouterr()
        return code, told.out, told.err


def own(text: str, name: str = "mine.yaml") -> Path:
    Path("policies").mkdir(exist_ok=True)
    path = Path("policies") / name
    path.write_text(text)
    return path


def test_list_shows_the_own_and_the_shipped_ones(run: Run) -> None:
    own(GOOD)

    code, told, _ = run("list")

    assert code == 0
    rows = {line.split()[0]: line for line in told.splitlines()}
    assert "policies/mine.yaml" in rows["mine"]
    assert "shipped" in rows["balanced"]
    assert rows["must-finish"].split()[1:6] == ["hybrid", "300", "ms", "none", "yes"]


def test_list_shows_what_is_good_and_complains_of_the_rest(run: Run) -> None:
    own("version: vmckpt/v1\nname: X Y\nmod: x\n")

    code, told, complaint = run("list", "--json")

    assert code == 4
    assert len(json.loads(told)) == 8
    assert len(complaint.splitlines()) == 2


def test_show_has_every_value_with_its_line(run: Run) -> None:
    own(GOOD)

    code, told, _ = run("show", "mine")
    assert code == 0
    assert any(
        line.split()[:4] == ["limits.max_downtime", "300", "ms", "11"] for line in told.splitlines()
    )

    code, told, _ = run("show", "policies/mine.yaml", "--json")
    shown = json.loads(told)
    assert (shown["name"], shown["limits"]["max_downtime"]) == ("mine", 0.3)
    assert {"key": "mode", "value": "hybrid", "from": "policies/mine.yaml:9"}.items() <= next(
        one for one in shown["values"] if one["key"] == "mode"
    ).items()


def test_show_of_an_unknown_one_names_the_likely_one(run: Run) -> None:
    code, _, complaint = run("show", "balancd")

    assert (code, complaint) == (4, "error: no policy 'balancd'; did you mean 'balanced'?\n")


def test_check_names_every_mistake_of_every_file_in_one_line_each(run: Run) -> None:
    good = own(LEAST)
    bad = own("version: vmckpt/v1\nname: bad\nlimits: {max_downtime: 3, time: 0s}\n", "bad.yaml")

    code, told, complaint = run("check", "policies", "none.yaml")

    assert code == 4
    assert told.splitlines() == [
        f"{bad}:3: limits.max_downtime: 3 is not a time; use a value with a unit, like 300ms or 5m",
        f"{bad}:3: limits.time: '0s' must be greater than 0",
        f"{good}: valid",
        "none.yaml: No such file or directory",
    ]
    assert complaint == "error: 3 problems; 1 of 3 files valid\n"


def test_check_of_good_files_says_so(run: Run) -> None:
    path = str(own(GOOD))

    assert run("check", path) == (0, f"{path}: valid\n", "")
    code, told, _ = run("check", path, "--json")
    assert (code, json.loads(told)) == (0, [{"file": path, "good": True, "problems": []}])


def test_explain_tells_which_policy_a_guest_gets_and_why_not_another(run: Run) -> None:
    own(LEAST + "select: {guest_labels: {tier: web}, host_labels: {rack: a1}}\n")

    code, told, _ = run("explain", "web1")

    assert code == 0
    assert told.splitlines()[:3] == [
        "web1 on alpha:",
        "  least, because the guest's label tier is web and the host's label rack is a1",
        "  not balanced: least matches more guest labels",
    ]


def test_explain_takes_a_policy_by_name_or_by_file_and_a_guest_by_uuid(run: Run) -> None:
    path = own(GOOD)

    for wanted in ("mine", str(path)):
        code, told, _ = run("explain", GUEST.uuid, "--policy", wanted, "--json")
        shown = json.loads(told)
        assert code == 0
        assert (shown["guest"], shown["host"], shown["policy"]) == ("web1", "alpha", "mine")
        assert shown["why"] == ["it was requested by name"]
        assert len(shown["passed_over"]) == 8


def test_explain_with_a_file_does_not_mind_what_is_wrong_with_others(run: Run) -> None:
    path = own(GOOD)
    own("version: vmckpt/v1\nname: bad\nlimits: {time: 0s}\n", "bad.yaml")

    code, told, _ = run("explain", "web1", "--policy", str(path), "--json")
    assert (code, json.loads(told)["policy"]) == (0, "mine")
    assert run("explain", "web1")[0] == 4


def test_explain_of_an_unknown_guest_names_the_likely_one(run: Run) -> None:
    code, _, complaint = run("explain", "wbe1")

    assert (code, complaint) == (2, "error: no guest 'wbe1' on alpha; did you mean web1?\n")


def test_policies_of_the_folder_named_go_before_those_beside_the_inventory(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own(GOOD)
    Path("other").mkdir()

    assert '"mine"' in run("list", "--json")[1]
    assert '"mine"' not in run("list", "--json", "--policies", "other")[1]
    monkeypatch.setenv("VMCKPT_POLICIES", "other")
    assert '"mine"' not in run("list", "--json")[1]


def test_schema_prints_what_lies_beside_the_shipped_policies(run: Run) -> None:
    code, told, _ = run("schema")

    assert code == 0
    assert json.loads(told)["title"] == "vmckpt policy"
    assert told == run("schema", "--json")[1]
