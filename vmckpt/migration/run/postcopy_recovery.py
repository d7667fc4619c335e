"""Monitor the stream after the switch to post-copy, and recover the stream when it breaks.

After the switch, the guest is in two parts: it is running on the target, and the source still has
the pages that have not been sent. Neither part may be destroyed. When the stream breaks, the guest
waits, QEMU keeps both parts, and the stream is restored in one of two ways:

* If the link is lost, no data arrives, but the connection stays open. TCP retries for a quarter of
  an hour and restores the stream by itself. Because TCP doubles its waits, this takes at most as
  long again as the outage. Giving up such a stream and resuming it would be faster, but is unsafe:
  QEMU's main loop on the target may itself be waiting for a page. libvirt sends its commands
  through that loop, so it could never order a resume (docs/adr/0010-post-copy-is-left-to-tcp.md).
* A stream that QEMU has given up on (the connection was reset, or TCP has given up) is resumed with
  the same parameters, repeatedly, with increasing waits.

When the policy's time to recover has passed, the operator must decide; both parts are still kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vmckpt.errors import VmckptError
from vmckpt.migration.run.progress import PassHistory
from vmckpt.model.guest import Presence
from vmckpt.model.migration import MigrationDriver
from vmckpt.units import Seconds, show_seconds

# Silence of this length is reported. TCP needs less time to recover from a one-second outage.
SILENCE = Seconds(5.0)
_FIRST_WAIT, _LONGEST_WAIT = Seconds(1.0), Seconds(30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The state of a post-copy that may be broken."""

    call_runs: bool
    """libvirt's migration call has not returned."""
    given_up: bool
    """QEMU on the source has given up on the stream; only then can the stream be resumed."""
    target_answers: bool
    broken: bool
    broken_for: Seconds
    """How long the stream has been broken; 0 if it is not broken."""
    attempts: int
    """Number of attempts to resume since the stream broke."""
    last_attempt: Seconds | None
    """How long ago the last attempt ended; None if there was none."""


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing.

    Data is moving, TCP is retrying, the target does not answer, or it is too early for the next
    attempt.
    """


@dataclass(frozen=True, slots=True)
class Resume:
    """Try to resume the stream."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the operator. Both parts of the guest stay as they are."""

    reason: str


Step = Wait | Resume | Ask


def backoff(attempts: int) -> Seconds:
    """Return the wait, in seconds, after an attempt to resume.

    `attempts`: number of attempts before this attempt.
    """
    return Seconds(min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(attempts, 10)))


def next_step(state: State, recover_for: Seconds) -> Step:
    """Return what to do now. `recover_for`: the policy's time to recover."""
    if state.broken and state.broken_for >= recover_for:
        return Ask(f"the stream was not restored within {show_seconds(recover_for)}")
    if state.call_runs or not state.given_up:
        return Wait()
    if state.last_attempt is not None and state.last_attempt < backoff(state.attempts - 1):
        return Wait()
    if not state.target_answers:
        return Wait()  # resuming to a host that does not answer would hang for minutes
    return Resume(f"QEMU has given up on the stream; attempt {state.attempts + 1}")


Say = Callable[[str, str, str], None]
_RULE = "post-copy"


class PostcopyRecovery:
    """Recovers the stream of one post-copy."""

    def __init__(
        self,
        migrations: MigrationDriver,
        recover_for: Seconds,
        say: Say,
        warn: Callable[[str], None],
    ) -> None:
        """`say` reports a decision: action, reason and rule."""
        self._migrations = migrations
        self._recover_for = recover_for
        self._say = say
        self._warn = warn
        self._broken_since: Seconds | None = None
        self._attempts = 0
        self._attempted_at: Seconds | None = None
        self.given_up = False
        """Whether the operator must decide."""

    @property
    def broken(self) -> bool:
        """Whether the guest is waiting for pages that do not arrive."""
        return self._broken_since is not None

    def look(self, track: PassHistory, now: Seconds, *, call_runs: bool) -> None:
        """Check, at every sample after the switch, whether data is moving.

        While libvirt's call runs (`call_runs`), also check whether the time to recover has passed.
        """
        silent = track.silent_for(now)
        if self._broken_since is None and silent >= SILENCE:
            self._break(
                Seconds(now - silent),
                "no data is moving; the transfer may resume by itself once the network is back",
            )
        elif self._broken_since is not None and self._moves(track, now, self._broken_since):
            self._say("post-copy continues", "data is moving again", _RULE)
            self._broken_since = self._attempted_at = None
            self._attempts = 0
        if call_runs:
            step = next_step(self._state(now, call_runs=True), self._recover_for)
            if isinstance(step, Ask):
                self.give_up(step.reason)

    async def may_resume(self, target: Presence, now: Seconds) -> bool:
        """Return whether to resume now, after libvirt's call ended with an error.

        If so, the target's end of the stream has been freed.
        """
        given_up = await self._migrations.is_postcopy_paused()
        if given_up and self._broken_since is None:
            self._break(now, "QEMU has given up on the stream")
        state = self._state(
            now, call_runs=False, given_up=given_up, target_answers=target.reachable
        )
        match next_step(state, self._recover_for):
            case Wait():
                return False
            case Ask(reason):
                self.give_up(reason)
                return False
            case Resume(reason):
                try:
                    await self._migrations.free_target()
                except VmckptError as exc:
                    self._warn(f"the stream could not be closed on the target: {exc.message}")
                self._say("resume post-copy", reason, _RULE)
                self._attempts += 1
                self._attempted_at = now
                return True

    def attempted(self, now: Seconds, error: VmckptError | None) -> None:
        """Record that an attempt to resume has ended, with `error` if it failed."""
        self._attempted_at = now
        # libvirt 9.0 may report the error that preceded the attempt even though QEMU has continued.
        if error is not None and self.broken:
            self._warn(f"post-copy could not be resumed: {error.message}")

    def give_up(self, reason: str) -> None:
        """Leave both parts as they are; the operator decides."""
        self.given_up = True
        self._say("wait for the operator", reason, _RULE)

    def _break(self, since: Seconds, why: str) -> None:
        self._broken_since = since
        self._say("keep both parts", why, _RULE)

    @staticmethod
    def _moves(track: PassHistory, now: Seconds, broken_since: Seconds) -> bool:
        moved = track.moved_at
        return moved is not None and moved > broken_since and now - moved < Seconds(1.0)

    def _state(
        self,
        now: Seconds,
        *,
        call_runs: bool,
        given_up: bool = False,
        target_answers: bool = True,
    ) -> State:
        since = self._broken_since
        return State(
            call_runs=call_runs,
            given_up=given_up,
            target_answers=target_answers,
            broken=since is not None,
            broken_for=Seconds(0.0 if since is None else now - since),
            attempts=self._attempts,
            last_attempt=None if self._attempted_at is None else Seconds(now - self._attempted_at),
        )
