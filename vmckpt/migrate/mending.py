"""Doing what `postcopy` decides: notice a dead stream, free the target, count the attempts."""

from collections.abc import Callable

from vmckpt.errors import VmckptError
from vmckpt.migrate import postcopy
from vmckpt.migrate.postcopy import Ask, Resume, State, Wait
from vmckpt.migrate.track import Track
from vmckpt.model.guest import Presence
from vmckpt.model.migration import Mover
from vmckpt.units import Seconds

Say = Callable[[str, str, str], None]
_RULE = "post-copy"


class Mending:
    """What was done about the stream of one post-copy."""

    def __init__(
        self, mover: Mover, recover_for: Seconds, say: Say, warn: Callable[[str], None]
    ) -> None:
        """`say` takes action, reason and rule of a decision."""
        self._mover = mover
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

    def look(self, track: Track, now: Seconds, *, call_runs: bool) -> None:
        """At every sample after the switch: do bytes move?"""
        silent = track.silent_for(now)
        if self._broken_since is None and silent >= postcopy.SILENCE:
            self._break(Seconds(now - silent), "no byte moves: TCP brings it back with the network")
        elif self._broken_since is not None and self._moves(track, now, self._broken_since):
            self._say("post-copy goes on", "bytes move again", _RULE)
            self._broken_since = self._attempted_at = None
            self._attempts = 0
        if call_runs:
            step = postcopy.next_step(self._state(now, call_runs=True), self._recover_for)
            if isinstance(step, Ask):
                self.give_up(step.reason)

    async def may_resume(self, target: Presence, now: Seconds) -> bool:
        """libvirt's call has ended with an error: whether to resume now. Frees the target first."""
        given_up = await self._mover.stream_given_up()
        if given_up and self._broken_since is None:
            self._break(now, "QEMU has given the stream up")
        state = self._state(
            now, call_runs=False, given_up=given_up, target_answers=target.reachable
        )
        match postcopy.next_step(state, self._recover_for):
            case Wait():
                return False
            case Ask(reason):
                self.give_up(reason)
                return False
            case Resume(reason):
                try:
                    await self._mover.free_target()
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
    def _moves(track: Track, now: Seconds, broken_since: Seconds) -> bool:
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
