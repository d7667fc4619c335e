"""Which operation an operator means. Pure."""

from collections.abc import Sequence
from typing import TypeVar

from vmckpt.errors import BadInput, meant
from vmckpt.journal.records import MAINTENANCE, Operation

T = TypeVar("T")


def is_prefix(name: str) -> bool:
    """Whether a name may stand for the ids that begin with it: "m-" would be all of them."""
    return len(name) > len("m-")


def choose(name: str, found: Sequence[Operation], *, ended: bool = False) -> Operation | None:
    """The one that is meant, of those whose id begins with `name` or whose guest is called so.

    An id wins. Otherwise what fits must be one alone; None if nothing fits at all. Raises BadInput
    if several fit, or if the guest has none that is active; with `ended` its last one will do.
    """
    wanted = name.lower()
    exact = next((one for one in found if one.id == wanted), None)
    if exact is not None:
        return exact
    # A host in maintenance is called by its name, and rather what is done to it is meant.
    named = [one for one in found if one.guest == name]
    guests = [one for one in named if one.kind != MAINTENANCE] or named
    begun = [one for one in found if one.id.startswith(wanted) and is_prefix(name)]
    meant = {one.id: one for one in [*begun, *(one for one in guests if one.active)]}
    if len(meant) == 1:
        return next(iter(meant.values()))
    if meant:
        latest = sorted(meant.values(), key=lambda one: -one.began_at)
        raise BadInput(f"{name!r} may be any of {_listed(latest)}", mend="name one of them")
    if guests:
        last = max(guests, key=lambda one: one.began_at)
        if ended:
            return last
        raise BadInput(
            f"guest {name} has no active job", mend=f"its last one was {last.id} ({last.outcome})"
        )
    return None


def unknown(name: str, names: Sequence[str]) -> BadInput:
    """The error for a name that nothing has, with those that are nearly it."""
    return BadInput(f"no job {name!r}", mend=meant(name, names, "run vmckpt jobs --all"))


def _listed(found: Sequence[Operation], most: int = 4) -> str:
    shown = ", ".join(f"{one.id} ({one.guest})" for one in found[:most])
    return shown if len(found) <= most else f"{shown} and {len(found) - most} more"
