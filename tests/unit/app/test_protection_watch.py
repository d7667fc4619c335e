"""Whether a watch is kept over protections."""

from tests.support.claims import journal, killed
from vmckpt.app import protection
from vmckpt.journal.store import Journal
from vmckpt.scheduler import leases as scheduler_leases
from vmckpt.scheduler.leases import LeaseOwner, ScheduleLeases

__all__ = ["journal"]


async def test_a_watch_is_kept_by_a_service_that_lives_and_has_it() -> None:
    other = ScheduleLeases("here", print)  # runs, and does not keep watch
    assert not protection._watch_is_kept()
    dead = killed(scheduler_leases.VIGIL)
    assert not protection._watch_is_kept()
    with Journal() as journal:
        journal.finish(dead, "failed", None)
    assert other.owner_of(scheduler_leases.VIGIL) is LeaseOwner.OURS
    assert protection._watch_is_kept()
    await other.end()
    assert not protection._watch_is_kept()
