"""Verification of the audit trail finds the first edited, removed or reordered entry."""

from dataclasses import fields, replace
from typing import Any

import pytest

from vmckpt.journal.audit_chain import (
    START,
    Actor,
    AuditEntry,
    AuditFact,
    Deed,
    Head,
    Verified,
    What,
    digest,
    following,
    verify,
)

_ACTOR = Actor(uid=0, user="root", sudo_user="ann", command="vmckpt migrate", host="ctl")
_DEED = Deed(
    what=What.BEGAN, job="m-7k3f", kind="migrate", guest="web", source="alpha", target="beta"
)
_FACT = AuditFact(at_ms=1_700_000_000_000, actor=_ACTOR, deed=_DEED)


def _trail(count: int, fact: AuditFact = _FACT) -> list[AuditEntry]:
    made: list[AuditEntry] = []
    for number in range(count):
        later = replace(fact, at_ms=fact.at_ms + number)
        made.append(following(_head(made[-1]) if made else None, later))
    return made


def _head(entry: AuditEntry) -> Head:
    return Head(seq=entry.seq, digest=entry.digest)


def _with(fact: AuditFact, **deed: Any) -> AuditFact:
    return replace(fact, deed=replace(fact.deed, **deed))


def _broken(entries: list[AuditEntry], head: str | None = None) -> tuple[int, str]:
    broken = verify(entries, head).broken
    assert broken is not None
    return broken.seq, broken.why


def test_an_empty_trail_is_valid() -> None:
    assert verify([]) == Verified(entries=0, head=START, broken=None)


def test_an_untouched_trail_is_valid() -> None:
    trail = _trail(5)
    assert verify(trail) == Verified(entries=5, head=trail[-1].digest, broken=None)


@pytest.mark.parametrize("part", ["at_ms", *(f"actor.{one.name}" for one in fields(Actor)),
                                  *(f"deed.{one.name}" for one in fields(Deed))])  # fmt: skip
def test_an_edit_of_each_field_is_found(part: str) -> None:
    trail = _trail(4)
    fact = trail[2].fact
    owner, _, name = part.rpartition(".")
    value: Any = 1 if name in ("at_ms", "uid") else "other"
    if owner:
        edited = replace(fact, **{owner: replace(getattr(fact, owner), **{name: value})})
    else:
        edited = replace(fact, at_ms=value)
    trail[2] = replace(trail[2], fact=edited)
    assert _broken(trail) == (3, "the entry was edited")
    assert verify(trail).head == trail[1].digest


def test_the_digest_of_an_entry_never_changes() -> None:
    """Trails that exist must stay valid: whatever changes this value breaks them all."""
    assert digest(1, _FACT, START) == (
        "44264ec73fa67b73bc82a64c523241ba26af8328f2f4fe54017ff16484c2c5af"
    )


def test_a_value_of_a_type_that_json_lacks_is_an_edit() -> None:
    trail = _trail(2)
    trail[1] = replace(trail[1], fact=_with(trail[1].fact, guest=b"web"))
    assert _broken(trail) == (2, "the entry was edited")
    odd: Any = "2"
    assert _broken([trail[0], replace(trail[1], seq=odd)])[1] == "the number is invalid"


def test_no_value_and_an_empty_text_differ() -> None:
    assert digest(1, _FACT, START) != digest(1, _with(_FACT, outcome=""), START)


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = _with(_FACT, kind='a","b', guest="c")
    other = _with(_FACT, kind="a", guest='b","c')
    assert digest(1, one, START) != digest(1, other, START)


def test_an_edit_with_a_new_digest_is_found_at_the_next_entry() -> None:
    trail = _trail(4)
    trail[1] = following(_head(trail[0]), _with(trail[1].fact, guest="other"))
    assert _broken(trail)[0] == 3


def test_removed_entries_are_named() -> None:
    trail = _trail(5)
    assert _broken([trail[0], *trail[3:]]) == (4, "entries 2 to 3 were removed")
    assert _broken(trail[1:]) == (2, "entry 1 was removed")


def test_a_removed_entry_is_found_after_renumbering() -> None:
    trail = _trail(4)
    third = replace(trail[2], seq=2)
    assert _broken([trail[0], third]) == (2, "the entry was edited")
    again = replace(third, digest=digest(2, third.fact, third.previous))
    assert _broken([trail[0], again])[0] == 2


def test_swapped_entries_are_found() -> None:
    trail = _trail(4)
    swapped = [trail[0], replace(trail[2], seq=2), replace(trail[1], seq=3), trail[3]]
    assert _broken(swapped)[0] == 2
    assert _broken([trail[0], trail[2], trail[1], trail[3]])[0] == 3


def test_a_duplicated_number_is_found() -> None:
    trail = _trail(3)
    assert _broken([*trail[:2], trail[1], trail[2]]) == (2, "number 2 is used twice or is invalid")


def test_only_a_known_head_reveals_a_removed_end() -> None:
    trail = _trail(5)
    assert verify(trail[:3]).broken is None
    assert _broken(trail[:3], trail[-1].digest)[0] == 4
    assert _broken([], trail[-1].digest)[0] == 1


def test_an_older_known_head_is_valid() -> None:
    trail = _trail(5)
    assert verify(trail, trail[2].digest).broken is None
    assert verify(trail, START).broken is None


def test_only_a_known_head_reveals_a_rewritten_trail() -> None:
    head = _trail(3)[-1].digest
    forged = _trail(3, replace(_FACT, actor=replace(_ACTOR, user="eve")))
    assert verify(forged).broken is None
    assert verify(forged, head).broken is not None


def test_the_recorded_head_reveals_a_removed_end() -> None:
    trail = _trail(5)
    recorded = _head(trail[-1])
    assert verify(trail, recorded=recorded).broken is None
    assert verify(_trail(7), recorded=recorded).broken is None  # appended in the meantime
    found = verify(trail[:3], recorded=recorded)
    assert found.broken is not None
    assert (found.broken.seq, found.broken.why) == (4, "entries 4 to 5 were removed from the end")
    found = verify(trail[:4], recorded=recorded)
    assert found.broken is not None
    assert found.broken.why == "entry 5 was removed from the end"


def test_the_recorded_head_reveals_a_replaced_last_entry() -> None:
    trail = _trail(3)
    forged = [*trail[:2], following(_head(trail[1]), _with(trail[2].fact, guest="other"))]
    assert verify(forged).broken is None
    found = verify(forged, recorded=_head(trail[2]))
    assert found.broken is not None
    assert (found.broken.seq, found.entries) == (3, 2)
