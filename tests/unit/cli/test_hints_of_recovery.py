"""What recovery says of a migration that it must not touch: the commands it names settle it."""

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import libvirt
import pytest

from tests.support.command_runs import ALPHA, Run, completed_driver, placed
from tests.support.engine_runs import ORDER
from tests.support.libvirt_nodes import node
from tests.support.recorded_jobs import WEB1
from vmckpt import inventory
from vmckpt.errors import GuestLocked, HypervisorError
from vmckpt.hypervisor import migration_leftovers
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.hypervisor.domains import find_guest
from vmckpt.journal.store import Journal
from vmckpt.migration.recovery.steps import Step
from vmckpt.migration.service import Attempts

TEST = replace(WEB1, guest="test", guest_uuid="6695eb01-f6a4-8304-79aa-97f2502e193f")
"""A migration of the guest of the test driver, which is running on alpha."""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """Hosts of libvirt's test driver: alpha with the running guest `test`, and beta."""
    placed(tmp_path, monkeypatch)
    with_state = completed_driver(monkeypatch)
    next(with_state)
    yield Run(capsys)
    next(with_state, None)


@pytest.fixture
def moved(run: Run) -> Iterator[str]:
    """An interrupted migration that libvirt was ordered to do."""
    with Journal() as journal:
        id_ = journal.begin(TEST)
        journal.intend(id_, Step.MOVE, {"order": ORDER.as_json()}, None)
        journal.leave(id_)
        yield id_


def outcome(id_: str) -> str | None:
    with Journal() as journal:
        return journal.operation(id_, ended=True).outcome


@pytest.mark.parametrize("silent", ["alpha", "beta", "both"])
def test_a_host_that_did_not_answer_is_asked_again_once_it_does(
    run: Run, moved: str, tmp_path: Path, silent: str
) -> None:
    inventory_file = tmp_path / "hosts.yaml"
    known = inventory_file.read_text()
    text = known
    if silent != "beta":
        text = text.replace(ALPHA, f"test://{tmp_path}/nothing")
    if silent != "alpha":
        text = text.replace(f"{tmp_path}/beta", f"{tmp_path}/nothing")
    inventory_file.write_text(text)
    told = run.wrong("recover")
    assert ("answer" in told, outcome(moved)) == (True, None)
    inventory_file.write_text(known)
    run.follow(told.splitlines()[-1])
    assert outcome(moved) == "failed"


def test_reports_that_do_not_fit_are_compared_again_a_minute_later(
    run: Run, moved: str, tmp_path: Path
) -> None:
    keeper = libvirt.open(ALPHA)
    keeper.lookupByName("test").suspend()
    beta = tmp_path / "beta"
    other = (
        "<domain type='test' xmlns:test='http://libvirt.org/schemas/domain/test/1.0'>"
        f"<name>test</name><uuid>{TEST.guest_uuid}</uuid><memory>65536</memory>"
        "<os><type>hvm</type></os><test:runstate>3</test:runstate></domain></node>"
    )
    beta.write_text(beta.read_text().replace("</node>", other))
    told = run.wrong("recover")
    assert ("are inconsistent" in told, outcome(moved)) == (True, None)
    node(beta, guest=False)
    run.follow(told.splitlines()[-1])
    assert outcome(moved) == "failed"
    keeper.lookupByName("test").resume()
    keeper.close()


def test_a_guest_that_changed_during_its_recovery_is_recovered_again(run: Run, moved: str) -> None:
    async def end() -> None:
        async with Hypervisor(inventory.load(Path("hosts.yaml")).host("alpha")) as alpha:
            await migration_leftovers.end_arriving(alpha, TEST.guest_uuid or "")

    with pytest.raises(HypervisorError) as caught:
        asyncio.run(end())
    run.follow(str(caught.value))
    assert outcome(moved) == "failed"


def test_a_guest_that_was_paused_after_its_preflight_is_found_paused(run: Run) -> None:
    keeper = libvirt.open(ALPHA)
    test = keeper.lookupByName("test")
    test.suspend()

    async def lock() -> None:
        async with Hypervisor(inventory.load(Path("hosts.yaml")).host("alpha")) as alpha:
            context: Any = SimpleNamespace(here=alpha, setting=SimpleNamespace(source=alpha.host))
            recorder: Any = SimpleNamespace(fence=None, acquire=lambda _: None)
            again: Any = None
            guest = await find_guest(alpha, "test")
            assert guest is not None
            await Attempts(context, recorder, again)._own(guest)

    with pytest.raises(GuestLocked) as caught:
        asyncio.run(lock())
    assert re.search(r"\btest\b.*\balpha\b.*paused", run.follow(str(caught.value)))
    test.resume()
    asyncio.run(lock())
    keeper.close()
