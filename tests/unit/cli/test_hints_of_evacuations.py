"""The hints about hosts that are emptied are commands that help: each is run as it is printed.

libvirt's test driver migrates no guest, so a policy shuts the guest down, or suspends it.
"""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import libvirt
import pytest

from tests.support.command_runs import ALPHA, Run, completed_driver, placed
from vmckpt import inventory as inventories
from vmckpt.app import rolling_maintenance
from vmckpt.errors import Cancelled, HookFailed, VmckptError
from vmckpt.journal import controller_identity
from vmckpt.journal.records import NewOperation
from vmckpt.journal.store import Journal
from vmckpt.units import Seconds

POLICY = "version: vmckpt/v1\nname: quiet\nselect: {{guests: [test]}}\nevacuate: {{strategy: {}}}\n"


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Hosts of libvirt's test driver: alpha with the running guest `test`, and beta."""
    placed(tmp_path, monkeypatch)
    (tmp_path / "policies").mkdir()
    strategy(tmp_path, "shutdown-and-return")
    with_state = completed_driver(monkeypatch)
    next(with_state)
    yield Run(capsys)
    next(with_state, None)


def strategy(folder: Path, name: str) -> None:
    (folder / "policies/quiet.yaml").write_text(POLICY.format(name))


def state(run: Run) -> str:
    (guest,) = json.loads(run.good("guests", "--json"))
    return str(guest["state"])


def closed(run: Run) -> list[str]:
    return [one["host"] for one in json.loads(run.good("maintenance", "list", "--json"))]


def line(told: str, words: str) -> str:
    """The last line that has these words."""
    return [one for one in told.splitlines() if words in one][-1]


def orphaned(kind: str, host: str) -> str:
    """A job for all guests of a host whose controller has ended, before it did anything."""
    controller = replace(controller_identity.this_process(), started=1)
    with Journal() as journal:
        return journal.begin(
            NewOperation(kind=kind, guest=host, source=host), controller=controller
        )


@pytest.mark.parametrize(
    ("how", "plan", "report"),
    [
        ("shutdown-and-return", "will be shut down", "shut down: test"),
        ("suspend-to-snapshot", "will be suspended", "suspended: test"),
    ],
)
def test_a_guest_that_was_stopped_runs_again_after_the_hint_of_the_plan_and_of_the_report(
    run: Run, tmp_path: Path, how: str, plan: str, report: str
) -> None:
    strategy(tmp_path, how)
    for words in (plan, report, "is empty after"):
        told = run.good("evacuate", "alpha", "--yes")
        assert (state(run), closed(run)) == ("shut-off", ["alpha"])
        run.follow(line(told, words), "--yes")
        assert (state(run), closed(run)) == ("running", [])


def test_a_host_without_guests_leaves_maintenance_after_the_hint(run: Run) -> None:
    told = run.good("evacuate", "beta", "--yes")
    assert closed(run) == ["beta"]
    run.follow(line(told, "is empty after"))
    assert closed(run) == []


def test_a_host_from_which_no_guest_was_moved_leaves_maintenance(run: Run) -> None:
    run.good("maintenance", "enter", "beta")
    run.follow(run.wrong("repopulate", "beta", "--yes"))
    assert closed(run) == []


def test_an_evacuation_that_was_interrupted_is_recovered_before_guests_are_moved_back(
    run: Run,
) -> None:
    id_ = orphaned("evacuate", "beta")
    told = run.wrong("repopulate", "beta", "--yes")
    assert f"{id_} is still evacuating beta" in told
    run.follow(told)
    assert "no guest was moved away from beta" in run.wrong("repopulate", "beta", "--yes")


def test_guests_have_a_target_once_a_host_in_maintenance_is_named_and_opened(
    run: Run, tmp_path: Path
) -> None:
    (tmp_path / "policies/quiet.yaml").unlink()
    run.good("maintenance", "enter", "beta", "--why", "new disk")
    told = run.wrong("evacuate", "alpha", "--dry-run")
    shown = run.follow(line(told, "→ "))
    assert ("new disk" in shown, closed(run)) == (True, ["beta"])
    run.good("maintenance", "leave", "beta")
    assert "make a host usable again" not in run("evacuate", "alpha", "--dry-run")[1]


def test_a_host_that_is_in_maintenance_for_another_reason_is_freed_before_its_turn(
    run: Run, tmp_path: Path
) -> None:
    """By leaving maintenance, or by moving its guests back."""
    with_ssh(tmp_path)
    roll = ("roll", "alpha", "--run", "true", "--yes")
    run.good("maintenance", "enter", "alpha", "--why", "new disk")
    run.follow(run.wrong(*roll))
    assert closed(run) == []
    run.good("evacuate", "alpha", "--yes", "--why", "new disk")
    run.follow(run.wrong(*roll), "--yes")
    assert (state(run), closed(run)) == ("running", [])
    assert "is in maintenance" not in run.wrong(*roll)


def with_ssh(folder: Path) -> None:
    """Give alpha an ssh address at which no server listens."""
    inventory = folder / "hosts.yaml"
    ssh = f"'{ALPHA}', ssh: {{address: '127.0.0.1', port: 1}}"
    inventory.write_text(inventory.read_text().replace(f"'{ALPHA}'", ssh))


async def _ended(error: type[VmckptError], *, stopped: bool, limit: float) -> str:
    """The message about alpha, which does not become healthy after its command."""
    stop = asyncio.Event()
    if stopped:
        stop.set()
    inventory = inventories.load(Path("hosts.yaml"))
    with pytest.raises(error) as caught:
        await rolling_maintenance._well(
            inventory, inventory.host("alpha"), Seconds(limit), stop, left=None
        )
    return str(caught.value)


def test_a_run_that_was_stopped_is_undone_by_the_hint(run: Run, tmp_path: Path) -> None:
    with_ssh(tmp_path)
    run.good("evacuate", "alpha", "--yes")
    told = asyncio.run(_ended(Cancelled, stopped=True, limit=60.0))
    run.follow(told, "--yes")
    assert (state(run), closed(run)) == ("running", [])


def test_a_host_that_does_not_become_healthy_is_examined_by_doctor(
    run: Run, tmp_path: Path
) -> None:
    with_ssh(tmp_path)
    told = asyncio.run(_ended(HookFailed, stopped=False, limit=-1.0))
    why = "ssh to 127.0.0.1:1: Connection refused"
    assert (why in told, why in run.follow(told, code=21)) == (True, True)


def test_a_guest_that_could_not_be_saved_is_saved_by_the_next_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy(tmp_path, "suspend-to-snapshot")

    def full(_: object) -> None:
        raise libvirt.libvirtError("No space left on device")

    with monkeypatch.context() as once:
        once.setattr(libvirt.virDomain, "managedSave", full)
        told = run.wrong("evacuate", "alpha", "--yes")
    assert state(run) == "running"
    run.follow(line(told, "→ "), "--yes")
    assert (state(run), closed(run)) == ("shut-off", ["alpha"])


def test_a_guest_that_is_slow_to_shut_down_gets_more_time(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first request does nothing. After the second one, the guest takes a second."""
    power_off = libvirt.virDomain.destroy
    presses: list[threading.Timer] = []

    def press(guest: libvirt.virDomain) -> None:
        presses.append(threading.Timer(1.0, lambda: power_off(guest)))
        if len(presses) > 1:
            presses[-1].start()

    monkeypatch.setattr(libvirt.virDomain, "shutdown", press)
    strategy(tmp_path, "shutdown-and-return, shutdown: 100ms")
    told = run.wrong("evacuate", "alpha", "--yes")
    assert (state(run), "shut test down from inside" in told) == ("running", True)
    strategy(tmp_path, "shutdown-and-return, shutdown: 30s")
    run.follow(line(told, "→ "), "--yes")
    assert (state(run), closed(run)) == ("shut-off", ["alpha"])
    presses[-1].join()
