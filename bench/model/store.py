"""What the lease store's functions answer: `witness_schema` in Python, on the model's clock.

tests/unit/test_model_store.py asks a real PostgreSQL the same questions.
"""

from collections.abc import Callable
from typing import Any

from bench.model.world import OLD, TERMS, Lease

Told = dict[str, Any]


def ask(lease: Lease, call: str, args: tuple[Any, ...]) -> tuple[Lease, Told]:
    """The row afterwards, and the answer. Ages in the answer are in ticks."""
    return _CALLS[call](lease, *args)


def crashed(lease: Lease) -> Lease:
    """It lost what a crash takes: all counts as renewed just now."""
    return lease._replace(age=0)


def waits(lease: Lease) -> float:
    """How long a takeover must wait by the store's clock."""
    return max(0.0, TERMS.ttl + TERMS.margin - lease.age)


def _change(lease: Lease, holder: str, state: str, claim: str) -> tuple[Lease, Told]:
    new = Lease(state=state, token=lease.token + 1, holder=holder, claim=claim)
    return new, {"said": "done", "token": new.token}


def _refusal(lease: Lease, token: int, holder: str) -> Told | None:
    if lease.holder != holder or lease.token != token:
        return {"said": "lost", "why": "another holds the lease, or with another token"}
    return None


def _acquire(lease: Lease, holder: str, claim: str) -> tuple[Lease, Told]:
    return _acquire_again(lease, holder, claim, 0)


def _acquire_again(lease: Lease, holder: str, claim: str, after: int) -> tuple[Lease, Told]:
    if lease.holder not in {"", holder}:
        return lease, {"said": "lost", "why": "another holds the lease"}
    if lease.holder == holder and lease.claim == claim:
        return lease, {"said": "done", "token": lease.token}
    return _change(lease._replace(token=max(lease.token, after)), holder, "held", claim)


def _renew_on(lease: Lease, token: int, holder: str, _: str) -> tuple[Lease, Told]:
    if _refusal(lease, token, holder):
        return lease, {
            "said": "lost",
            "forgot": lease.token < token and lease.holder in {"", holder},
        }
    return lease._replace(age=0), {"said": "done", "state": lease.state}


def _validate(lease: Lease, token: int, holder: str) -> tuple[Lease, Told]:
    if no := _refusal(lease, token, holder):
        return lease, no
    return lease._replace(state="protected"), {"said": "done"}


def _invalidate(lease: Lease, token: int, holder: str, claim: str) -> tuple[Lease, Told]:
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if no := _refusal(lease, token, holder):
        return lease, no
    return _change(lease, holder, "held", claim)


def _hand_over(lease: Lease, token: int, holder: str, to: str, claim: str) -> tuple[Lease, Told]:
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if no := _refusal(lease, token, holder):
        return lease, no
    if lease.state != "protected":
        return lease, {"said": "denied", "why": "the standby is not valid"}
    return _change(lease, to, "held", claim)


def _release(lease: Lease, token: int, holder: str) -> tuple[Lease, Told]:
    if not lease.holder and lease.token == token + 1:
        return lease, {"said": "done"}
    if no := _refusal(lease, token, holder):
        return lease, no
    return _change(lease, "", "free", "")[0], {"said": "done"}


def _take_over(
    lease: Lease, token: int, holder: str, claim: str, *watch: Any
) -> tuple[Lease, Told]:
    beat, watched = watch
    if lease.claim == claim and lease.token == token + 1:
        return lease, {"said": "done", "token": lease.token}
    if lease.token != token or lease.state != "protected" or lease.holder == holder:
        return lease, {"said": "denied", "why": "the standby is not valid, or of another token"}
    # A beat that beta knows is renamed when the lease is renewed: see `moves.asked`.
    rest = max(waits(lease), TERMS.ttl + TERMS.margin - (watched if beat == "1" else 0.0))
    if rest > 0:
        return lease, {"said": "wait", "rest": min(rest, OLD), "beat": "1"}
    return _change(lease, holder, "held", claim)


def _look(lease: Lease) -> tuple[Lease, Told]:
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
