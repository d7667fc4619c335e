"""Where a guest belongs after a failover: its old host gets it back only if nobody else has it."""

import asyncio
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.replicas import session as made_session
from vmckpt.agent.orders import ReplicaOrder
from vmckpt.agent.replication import orders, teardown
from vmckpt.errors import GuestLocked, HypervisorError, RemoteError, VmckptError
from vmckpt.hypervisor import standby_domain as hypervisor_standby_domain
from vmckpt.hypervisor.qemu_process import identity
from vmckpt.lease import client
from vmckpt.model.host import Host
from vmckpt.model.migration import Outcome
from vmckpt.protection import agent_client, recovery, start
from vmckpt.protection import stop as protection_stop
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.migration import finish
from vmckpt.protection.request import Setting
from vmckpt.protection.stop import Known
from vmckpt.replication.backup import standby_setup, standby_xml
from vmckpt.replication.session import Disk

ALPHA = Host(name="alpha", uri="qemu+tcp://alpha/system")
BETA = Host(name="beta", uri="qemu+tcp://beta/system")
OPERATION = cast(
    "Any",
    SimpleNamespace(id="7", guest="web1", guest_uuid="u-1", detail={}, source="alpha",
                    target="beta"),
)  # fmt: skip
KNOWN = Known(
    operation=OPERATION, primary=ALPHA, backup=BETA, lease="postgresql://w/db", session="5e55"
)
NOTHING = {"role": None, "runs": False, "known": False}
SHOT = {"role": "primary", "runs": False, "outcome": "died", "why": "the guard ended the guest"}
RUNS = {"role": "primary", "runs": True, "phase": "protecting"}
Did = list[tuple[Any, ...]]


def hosts(
    monkeypatch: pytest.MonkeyPatch, says: Mapping[str, Any], silent: tuple[str, ...] = ()
) -> Did:
    """Two hosts that say that; what they are told to do."""
    did: Did = []

    async def order(host: Host, _: str, what: str, **more: Any) -> dict[str, Any]:
        if host.name in silent:
            raise RemoteError(f"{host.name}: no answer")
        if what == "ask":
            return dict(says[host.name])
        did.append((host.name, what, more.get("define", True)))
        return {"did": []}

    async def ask(host: Host, guest: str, **more: Any) -> ProtectionStatus:
        return parse_answer(await order(host, guest, "ask", **more))

    async def status(host: Host, guest: str) -> ProtectionStatus:
        try:
            return parse_answer(await order(host, guest, "ask"))
        except RemoteError as exc:
            return parse_answer({"error": str(exc), "unreachable": True, "silent": True})

    for name, function in (("order", order), ("request", ask), ("status", status)):
        monkeypatch.setattr(agent_client, name, function)
    monkeypatch.setattr(client, "revoke", lambda *_, **__: did.append(("lease", "revoke")))
    return did


def settled(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What recover makes of it."""
    case = SimpleNamespace(
        step=lambda _: SimpleNamespace(intent={"session": "5e55", "lease": True}),
        operation=OPERATION, host=ALPHA, dry=False,
        inventory=SimpleNamespace(host=lambda _: BETA, lease="postgresql://w/db"),
        recorder=SimpleNamespace(entrust=lambda _: None, update=lambda **_: None),
        ended=lambda found, **_: found,
    )  # fmt: skip
    del monkeypatch
    return asyncio.run(recovery.settle(cast("Any", case), ()))


@pytest.mark.parametrize("ours", [NOTHING, SHOT, None])
@pytest.mark.parametrize("theirs", [{"runs": True, "known": True}, {"runs": False, "known": True}])
def test_a_backup_that_was_started_anew_keeps_the_guest_that_it_took_over(
    monkeypatch: pytest.MonkeyPatch, ours: Mapping[str, Any] | None, theirs: Mapping[str, Any]
) -> None:
    says = {"alpha": ours, "beta": {"role": None, **theirs}}
    did = hosts(monkeypatch, says, silent=() if ours else ("alpha",))
    found = settled(monkeypatch)
    assert found.outcome is Outcome.COMPLETED
    assert "failed over to beta" in found.truth
    assert ("alpha", "end", True) not in did
    assert (("alpha", "end", False) in did) is (ours is not None)


def test_while_libvirt_of_a_backup_started_anew_is_silent_nobody_gets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    unclear = {"role": None, "runs": False, "known": None}
    did = hosts(monkeypatch, {"alpha": SHOT, "beta": unclear})
    assert settled(monkeypatch).outcome is None
    with pytest.raises(HypervisorError, match="may have failed over to beta"):
        asyncio.run(protection_stop.where(KNOWN))
    assert not did


def test_where_both_have_forgotten_all_and_the_backup_knows_no_guest_it_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did = hosts(monkeypatch, {"alpha": NOTHING, "beta": NOTHING})
    assert settled(monkeypatch).outcome is Outcome.COMPLETED
    assert ("alpha", "end", True) in did
    assert asyncio.run(protection_stop.where(KNOWN)) is ALPHA


def test_a_guest_that_runs_on_its_primary_is_its_primarys(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts(monkeypatch, {"alpha": RUNS, "beta": {"role": None, "runs": False, "known": True}})
    assert asyncio.run(protection_stop.where(KNOWN)) is ALPHA


def test_a_silent_backup_may_have_the_guest_unless_it_runs_on_the_primary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did = hosts(monkeypatch, {"alpha": NOTHING}, silent=("beta",))

    @contextmanager
    def attended(*_: object) -> Iterator[Any]:
        yield SimpleNamespace(finish=lambda *_: did.append(("finish",)))

    monkeypatch.setattr(protection_stop, "attended", attended)
    with pytest.raises(RemoteError):
        asyncio.run(protection_stop.unprotect(KNOWN, cast("Any", SimpleNamespace(warn=print))))
    assert not did
    hosts(monkeypatch, {"alpha": RUNS}, silent=("beta",))
    assert asyncio.run(protection_stop.where(KNOWN)) is ALPHA


def test_an_undone_protection_keeps_the_lease_of_a_primary_that_could_not_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beginning = object.__new__(start.Beginning)
    beginning._setting = Setting(primary=ALPHA, backup=BETA, lease="postgresql://w/db")
    beginning._guest = cast("Any", SimpleNamespace(uuid="u-1"))
    beginning._caller = cast("Any", SimpleNamespace(warn=print))
    beginning._request = cast("Any", SimpleNamespace(automatic=True, move=None))
    beginning.session = "5e55"
    both = {"alpha": NOTHING, "beta": NOTHING}
    did = hosts(monkeypatch, both, silent=("alpha",))
    asyncio.run(beginning._undo(VmckptError("its agent has ended")))
    assert did == [("beta", "end", True)]
    did = hosts(monkeypatch, both, silent=("beta",))
    asyncio.run(beginning._undo(VmckptError("its agent has ended")))
    assert did == [("alpha", "end", True), ("lease", "revoke")]


def test_a_move_whose_target_lost_the_standby_before_it_ran_is_taken_back() -> None:
    lost = {"role": "backup", "runs": False, "agent": False, "outcome": "lost"}
    assert finish.never_ran(parse_answer(lost))
    assert not finish.never_ran(parse_answer({**lost, "ran": True}))
    assert not finish.never_ran(parse_answer({**lost, "outcome": "failed-over"}))


def order(state: Path, **more: Any) -> ReplicaOrder:
    return ReplicaOrder(what="end", guest="u-1", uri="x", host="beta", owner="5e55",
                        state=str(state), **more)  # fmt: skip


def test_a_backup_whose_guest_runs_does_not_end_it_as_a_standby(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It took over between the question where the guest is and the order to end its standby."""
    folder = tmp_path / "folder"
    folder.mkdir()
    told = made_session(role="backup", session="5e55")
    told.write(folder)
    (folder / "ours").touch()
    standby_setup.note_run(folder)
    monkeypatch.setattr(orders, "folder_of", lambda _: folder)
    with pytest.raises(GuestLocked, match="is now running on beta"):
        orders._end(order(tmp_path, define=False))


def test_what_its_owner_has_changed_or_stopped_since_a_failover_stays_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also recover that comes late must come to an end."""
    folder = tmp_path / "folder"
    told = made_session(role="backup", session="5e55")
    defined: list[str] = []
    known = [True]
    monkeypatch.setattr(orders, "folder_of", lambda _: folder)
    monkeypatch.setattr(orders, "_known", lambda _: known[0])
    monkeypatch.setattr(identity, "runs", lambda _: False)
    monkeypatch.setattr(teardown, "define", lambda one: defined.append(one.name))
    for settled_already, is_known, wanted in (
        (True, True, []), (False, True, []), (True, False, []), (False, False, [told.name]),
    ):  # fmt: skip
        folder.mkdir()
        told.write(folder)
        (folder / "ours").touch()
        standby_setup.note_run(folder)
        if settled_already:
            standby_setup.note_settled(folder)
        known[0] = is_known
        defined.clear()
        assert orders._end(order(tmp_path)) == {
            "did": ["ended the protection; the guest stays on this host"]
        }
        assert defined == wanted
        assert not folder.exists()


def test_a_backup_that_takes_over_while_it_is_ended_goes_on_with_that(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    made_session(role="backup", session="5e55").write(folder)
    started: list[Path] = []

    def stop(_: Path) -> None:
        (folder / "over").touch()
        (folder / "ours").touch()  # in that moment
        standby_setup.note_run(folder)

    monkeypatch.setattr(orders, "folder_of", lambda _: folder)
    monkeypatch.setattr(orders, "_stop_agent", stop)
    monkeypatch.setattr(orders, "_start", started.append)
    with pytest.raises(GuestLocked, match="is now running on beta"):
        orders._end(order(tmp_path, define=False))
    assert started == [folder]
    assert not (folder / "over").exists()


@pytest.mark.parametrize("define", [True, False])
def test_a_guest_that_never_came_to_life_on_the_backup_is_not_defined_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, define: bool
) -> None:
    """Its source has taken it back, and the target's next boot would start a second one."""
    folder, image = tmp_path / "folder", tmp_path / "web1.qcow2"
    folder.mkdir()
    image.touch()
    disk = Disk(target="vda", size=4096, path=str(image), format="qcow2")
    made_session(role="backup", session="5e55", disks=(disk,)).write(folder)
    (folder / "ours").touch()
    monkeypatch.setattr(orders, "folder_of", lambda _: folder)
    monkeypatch.setattr(standby_setup, "waits", lambda _: False)
    monkeypatch.setattr(standby_setup, "_runs_here", lambda _: False)
    monkeypatch.setattr(teardown, "define", lambda _: pytest.fail("it was defined"))
    done = orders._end(order(tmp_path, define=define))
    assert done == {"did": [f"removed {image}"]}
    assert not image.exists()
    assert not folder.exists()


def test_who_is_not_protected_any_more_is_not_told_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = {"role": "backup", "runs": True, "agent": True, "ready": True}
    runs = {"role": None, "runs": True, "known": True}
    did = hosts(monkeypatch, {"alpha": runs, "beta": waits})
    found = settled(monkeypatch)
    assert (found.outcome, "a standby is left on beta" in found.truth) == (Outcome.FAILED, True)
    assert ("beta", "end", False) in did
    hosts(monkeypatch, {"alpha": runs, "beta": NOTHING})
    assert settled(monkeypatch).outcome is Outcome.COMPLETED


def test_images_of_a_standby_that_a_reboot_ended_go_and_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state, images = tmp_path / "state", tmp_path / "images"
    state.mkdir()
    images.mkdir()
    ours, ran, others = (images / name for name in ("ours.qcow2", "ran.qcow2", "others.qcow2"))
    for path, mark in ((ours, "5e55"), (ran, None), (others, "another")):
        path.touch()
        if mark is not None:
            standby_setup._mark(path).write_text(mark)
    (state / "images.json").write_text(json.dumps([str(ours), str(ran), str(others)]))
    monkeypatch.setattr(orders, "folder_of", lambda _: tmp_path / "none")
    done = orders._end(order(state, define=False))
    assert done == {"did": [f"removed {ours}"]}
    assert sorted(path.name for path in images.iterdir() if not path.name.startswith(".")) == [
        "others.qcow2", "ran.qcow2",
    ]  # fmt: skip
    assert not standby_setup._mark(ours).exists()
    assert not state.exists()


def test_a_lease_is_released_before_the_standby_is_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody renews it by then, and the standby takes over when it has run out."""
    did: list[str] = []

    def tells(*_: object) -> bool:
        did.append("tells")
        return False

    monkeypatch.setattr(teardown, "_hears_in_time", tells)
    monkeypatch.setattr(teardown, "_release", lambda *_: did.append("releases"))
    told = cast("Any", SimpleNamespace(lease=object()))
    assert teardown._standby_is_told(told, Path("/nowhere"))
    assert did == ["releases", "tells"]


def test_images_of_a_standby_whose_host_was_rebooted_are_found_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """QEMU and its agent are gone then, and nobody else knows of them."""
    monkeypatch.setattr(standby_xml, "standby", lambda *_, **__: "<domain/>")
    monkeypatch.setattr(hypervisor_standby_domain, "create_paused", lambda *_, **__: None)
    path, taken = tmp_path / "web1.qcow2", tmp_path / "data.qcow2"
    taken.write_bytes(b"the guest's, from before")
    monkeypatch.setattr(standby_setup, "_check", lambda *_: None)
    disks = (
        Disk(target="vda", size=1 << 20, path=str(path), format="qcow2"),
        Disk(target="vdb", size=1 << 20, path=str(taken), format="qcow2", taken=True),
    )
    state = tmp_path / "state"
    standby_setup.make(made_session(session="5e55", disks=disks, state=str(state)), "<domain/>")
    assert path.exists()
    assert standby_setup.forget_images(state, "another") == []
    standby_setup.make(made_session(session="5e55", disks=disks, state=str(state)), "<domain/>")
    assert standby_setup.forget_images(state, "5e55") == [str(path)]
    assert (path.exists(), taken.exists()) == (False, True)
