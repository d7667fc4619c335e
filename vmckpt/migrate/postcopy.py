"""After the switch to post-copy: is the stream alive, and what mends a broken one? Pure.

From the switch on the guest is in two parts: it runs on the target, and the source holds the pages
that have not moved yet. Nothing may end either part. When the stream breaks the guest waits, QEMU
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

from dataclasses import dataclass

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
