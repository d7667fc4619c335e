"""After the switch to post-copy: is the stream alive, and how is a broken one recovered?

From the switch on the guest is in two parts: it runs on the target, and the source holds the pages
that have not moved yet. Neither part may be ended. When the stream breaks the guest waits, QEMU
keeps both parts, and the stream comes back in one of two ways:

* A link that is cut is silent. TCP goes on trying for a quarter of an hour and brings the stream
  back by itself, at the latest after as much time again as the cut has lasted (its waits double).
  That is left to TCP. To let go of such a stream and resume it would be faster and is a trap: on
  the target QEMU's main loop may wait for a page itself, and then libvirt, which asks through that
  loop, cannot tell it to resume, ever (docs/adr/0010-post-copy-is-left-to-tcp.md).
* A stream that QEMU has given up (the connection was reset, or TCP's patience is over) is resumed
  with the same parameters, again and again, waiting longer each time.

When the policy's time for that is over the operator is asked, and both parts are still kept.
"""

from collections.abc import Callable
from dataclasses import dataclass

from vmckpt.errors import VmckptError
from vmckpt.migration.run.progress import PassHistory
from vmckpt.model.guest import Presence
from vmckpt.model.migration import MigrationDriver
from vmckpt.units import Seconds, show_seconds

# So long without a byte is worth telling: longer than TCP needs after a cut of a second.
SILENCE = Seconds(5.0)
_FIRST_WAIT, _LONGEST_WAIT = Seconds(1.0), Seconds(30.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A post-copy that may be broken."""

    call_runs: bool
    """libvirt's call that moves the guest has not ended."""
    given_up: bool
    """QEMU on the source has given the stream up: only then can it be resumed."""
    target_answers: bool
    broken: bool
    broken_for: Seconds
    """0 if it is not."""
    attempts: int
    """To resume, since it broke."""
    last_attempt: Seconds | None
    """How long ago the last one ended; None: there was none."""


@dataclass(frozen=True, slots=True)
class Wait:
    """It moves, TCP is at it, or it is too early for the next attempt."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Try to go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """It is the operator's turn. Both parts of the guest stay as they are."""

    reason: str


Step = Wait | Resume | Ask


def backoff(attempts: int) -> Seconds:
    """Wait before the next attempt, after that many."""
    return Seconds(min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(attempts, 10)))


def next_step(state: State, recover_for: Seconds) -> Step:
    """What to do now."""
    if state.broken and state.broken_for >= recover_for:
        return Ask(f"it did not come back within {show_seconds(recover_for)}")
    if state.call_runs or not state.given_up:
        return Wait()
    if state.last_attempt is not None and state.last_attempt < backoff(state.attempts - 1):
        return Wait()
    if not state.target_answers:
        return Wait()  # to resume towards a host that does not answer would hang for minutes
    return Resume(f"QEMU has given the stream up; attempt {state.attempts + 1}")


Say = Callable[[str, str, str], None]
_RULE = "post-copy"


class PostcopyRecovery:
    """What was done about the stream of one post-copy."""

    def __init__(
        self,
        migrations: MigrationDriver,
        recover_for: Seconds,
        say: Say,
        warn: Callable[[str], None],
    ) -> None:
        """`say` takes action, reason and rule of a decision."""
        self._migrations = migrations
        self._recover_for = recover_for
        self._say = say
        self._warn = warn
        self._broken_since: Seconds | None = None
        self._attempts = 0
        self._attempted_at: Seconds | None = None
        self.given_up = False
        """The operator's turn has come."""

    @property
    def broken(self) -> bool:
        """Whether the guest waits for pages that do not come."""
        return self._broken_since is not None

    def look(self, track: PassHistory, now: Seconds, *, call_runs: bool) -> None:
        """At every sample after the switch: do bytes move?"""
        silent = track.silent_for(now)
        if self._broken_since is None and silent >= SILENCE:
            self._break(Seconds(now - silent), "no byte moves: TCP brings it back with the network")
        elif self._broken_since is not None and self._moves(track, now, self._broken_since):
            self._say("post-copy goes on", "bytes move again", _RULE)
            self._broken_since = self._attempted_at = None
            self._attempts = 0
        if call_runs:
            step = next_step(self._state(now, call_runs=True), self._recover_for)
            if isinstance(step, Ask):
                self.give_up(step.reason)

    async def may_resume(self, target: Presence, now: Seconds) -> bool:
        """libvirt's call has ended with an error: whether to resume now. Frees the target first."""
        given_up = await self._migrations.is_postcopy_paused()
        if given_up and self._broken_since is None:
            self._break(now, "QEMU has given the stream up")
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
                    self._warn(f"the target's end of the stream was not freed: {exc.message}")
                self._say("resume post-copy", reason, _RULE)
                self._attempts += 1
                self._attempted_at = now
                return True

    def attempted(self, now: Seconds, error: VmckptError | None) -> None:
        """An attempt to resume has ended so."""
        self._attempted_at = now
        # libvirt 9.0 may tell an attempt of the error before it, though QEMU goes on meanwhile.
        if error is not None and self.broken:
            self._warn(f"post-copy could not be resumed: {error.message}")

    def give_up(self, reason: str) -> None:
        """Leave both parts as they are; the operator decides."""
        self.given_up = True
        self._say("ask the operator", reason, _RULE)

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
