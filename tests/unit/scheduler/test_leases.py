"""What one service alone does: whose it is."""

import pytest

from tests.support.claims import journal, killed
from vmckpt.errors import GuestLocked, JournalError
from vmckpt.journal.recorder import Recorder
from vmckpt.scheduler.leases import LeaseOwner, ScheduleLeases

__all__ = ["journal"]


async def test_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    warned: list[str] = []
    first, second = ScheduleLeases("here", print), ScheduleLeases("here", warned.append)
    assert (first.owner_of("pages"), second.owner_of("pages")) == (
        LeaseOwner.OURS,
        LeaseOwner.ANOTHERS,
    )

    killed("vigil")
    assert second.owner_of("vigil") is LeaseOwner.UNSURE
    assert warned[-1].startswith("this service is not responsible for the failure detector: ")
    assert second.stale

    def unreadable(*_: object) -> None:
        raise JournalError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "acquire", unreadable)
        assert second.owner_of("mine/often") is LeaseOwner.UNSURE
    await first.end()
    assert second.owner_of("pages") is LeaseOwner.ANOTHERS, "it is asked again after a while"
    second.settled()
    assert second.owner_of("pages") is LeaseOwner.OURS
    await second.end()


@pytest.mark.parametrize(
    ("interrupted", "owner"), [(True, LeaseOwner.UNSURE), (False, LeaseOwner.ANOTHERS)]
)
async def test_the_wording_of_a_hint_does_not_decide_whether_a_service_is_dead(
    monkeypatch: pytest.MonkeyPatch, interrupted: bool, owner: LeaseOwner
) -> None:
    refused = GuestLocked(
        "it is locked", hint="look at the job" if interrupted else "run vmckpt recover"
    )
    refused.interrupted = interrupted

    def refuse(*_: object) -> None:
        raise refused

    service = ScheduleLeases("here", lambda _: None)
    monkeypatch.setattr(Recorder, "acquire", refuse)
    assert service.owner_of("mine/often") is owner
    assert service.stale is interrupted
    await service.end()
