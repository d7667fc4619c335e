"""The lease store's functions: `witness_schema` in Python, on the model's clock.

tests/unit/project/test_model_store.py compares the answers with those of a real PostgreSQL.
"""

from collections.abc import Callable
from typing import Any

from bench.model.world import OLD, TERMS, Lease

Told = dict[str, Any]


def ask(lease: Lease, call: str, args: tuple[Any, ...], timeline: str = "1") -> tuple[Lease, Told]:
    """Call a function. Returns the row afterwards, and the answer, in which ages are in ticks.

    `timeline`: PostgreSQL's timeline.
    """
    return _CALLS[call](lease, timeline, *args)


def confirmed(lease: Lease, timeline: str) -> bool:
    """Return whether no change of the token before a failover can be missing."""
    return lease.timeline == timeline


def confirms(told: str, timeline: str) -> bool:
    """Return whether a renewal confirms its token. A renewal from before a failover does not."""
    return told == timeline


def crashed(lease: Lease) -> Lease:
    """Return the row after a crash: the lease counts as renewed just now."""
    return lease._replace(age=0)


def waits(lease: Lease) -> float:
    """Return how long a takeover must wait, in ticks of the store's clock."""
    return max(0.0, TERMS.ttl + TERMS.margin - lease.age)


def _change(lease: Lease, timeline: str, holder: str, state: str, claim: str) -> tuple[Lease, Told]:
    token = lease.token + 1
    new = Lease(state=state, token=token, holder=holder, claim=claim, timeline=timeline)
    return new, {"said": "done", "token": new.token}


def _refusal(lease: Lease, token: int, holder: str) -> Told | None:
    if lease.holder != holder or lease.token != token:
        return {"said": "lost", "why": "another holds the lease, or with another token"}
    return None


def _acquire(lease: Lease, timeline: str, holder: str, claim: str) -> tuple[Lease, Told]:
    return _acquire_again(lease, timeline, holder, claim, 0)


def _acquire_again(
    lease: Lease, timeline: str, holder: str, claim: str, after: int
) -> tuple[Lease, Told]:
    if lease.holder not in {"", holder}:
        return lease, {"said": "lost", "why": "another holds the lease"}
    if lease.holder == holder and lease.claim == claim:
        return lease, {"said": "done", "token": lease.token, "timeline": timeline}
    newest = lease._replace(token=max(lease.token, after))
    new, told = _change(newest, timeline, holder, "held", claim)
    return new, {**told, "timeline": timeline}


def _renew_on(
    lease: Lease, timeline: str, token: int, holder: str, known: str
) -> tuple[Lease, Told]:
    if _refusal(lease, token, holder):
        forgot = lease.token < token and lease.holder in {"", holder}
        return lease, {"said": "lost", "timeline": timeline, "forgot": forgot}
    of = timeline if confirms(known, timeline) else lease.timeline
    new = lease._replace(age=0, timeline=of)
    return new, {"said": "done", "timeline": timeline, "state": lease.state}


def _validate(lease: Lease, _: str, token: int, holder: str) -> tuple[Lease, Told]:
    if no := _refusal(lease, token, holder):
        return lease, no
    return lease._replace(state="protected"), {"said": "done"}


def _invalidate(
    lease: Lease, timeline: str, token: int, holder: str, claim: str
) -> tuple[Lease, Told]:
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if no := _refusal(lease, token, holder):
        return lease, no
    return _change(lease, timeline, holder, "held", claim)


def _hand_over(
    lease: Lease, timeline: str, token: int, holder: str, *words: str
) -> tuple[Lease, Told]:
    to, claim = words
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if no := _refusal(lease, token, holder):
        return lease, no
    if lease.state != "protected":
        return lease, {"said": "denied", "why": "the standby is not valid"}
    return _change(lease, timeline, to, "held", claim)


def _release(lease: Lease, timeline: str, token: int, holder: str) -> tuple[Lease, Told]:
    if not lease.holder and lease.token == token + 1:
        return lease, {"said": "done"}
    if no := _refusal(lease, token, holder):
        return lease, no
    return _change(lease, timeline, "", "free", "")[0], {"said": "done"}


def _take_over(
    lease: Lease, timeline: str, token: int, holder: str, claim: str, *watch: Any
) -> tuple[Lease, Told]:
    beat, watched = watch
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if lease.token != token or lease.state != "protected" or lease.holder == holder:
        return lease, {"said": "denied", "why": "the standby is not valid, or of another token"}
    if not confirmed(lease, timeline):
        return lease, {"said": "denied", "why": "the holder has not confirmed the standby"}
    # A beat that beta knows is renamed when the lease is renewed: see `moves.asked`.
    rest = max(waits(lease), TERMS.ttl + TERMS.margin - (watched if beat == "1" else 0.0))
    if rest > 0:
        return lease, {"said": "wait", "rest": min(rest, OLD), "beat": "1"}
    return _change(lease, timeline, holder, "held", claim)


def _look(lease: Lease, _: str) -> tuple[Lease, Told]:
    told = {
        "said": "done", "guest": "g", "session": "s", "state": lease.state, "token": lease.token,
        "holder": lease.holder or None, "ttl": TERMS.ttl, "margin": TERMS.margin, "age": 0.0,
        "rest": waits(lease), "beat": "1",
    }  # fmt: skip
    return lease, told


_CALLS: dict[str, Callable[..., tuple[Lease, Told]]] = {
    "acquire": _acquire, "acquire_again": _acquire_again, "renew_on": _renew_on,
    "validate": _validate, "invalidate": _invalidate,
    "hand_over": _hand_over, "release": _release, "take_over": _take_over, "look": _look,
}  # fmt: skip
