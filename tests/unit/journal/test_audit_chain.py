"""Verification of the audit trail finds the first edited, removed or reordered entry."""

from dataclasses import fields, replace

import pytest

from vmckpt.journal.audit_chain import (
    START,
    AuditEntry,
    AuditFact,
    Verified,
    digest,
    following,
    verify,
)

_FACT = AuditFact(
    at_ms=1_700_000_000_000,
    user="ann@desk",
    controller_host="ctl",
    what="began",
    job="m-7k3f",
    kind="migrate",
    guest="web",
    source="alpha",
    target="beta",
    outcome=None,
)


def _trail(count: int) -> list[AuditEntry]:
    made: list[AuditEntry] = []
    for number in range(count):
        fact = replace(_FACT, at_ms=_FACT.at_ms + number)
        made.append(following(made[-1] if made else None, fact))
    return made


def _broken(entries: list[AuditEntry], head: str | None = None) -> tuple[int, str]:
    broken = verify(entries, head).broken
    assert broken is not None
    return broken.seq, broken.why


def test_an_empty_trail_is_valid() -> None:
    assert verify([]) == Verified(entries=0, head=START, broken=None)


def test_an_untouched_trail_is_valid() -> None:
    trail = _trail(5)
    assert verify(trail) == Verified(entries=5, head=trail[-1].digest, broken=None)


@pytest.mark.parametrize("name", [one.name for one in fields(AuditFact)])
def test_an_edit_of_each_field_is_found(name: str) -> None:
    trail = _trail(4)
    value = 1 if name == "at_ms" else "other"
    trail[2] = replace(trail[2], fact=replace(trail[2].fact, **{name: value}))
    assert _broken(trail) == (3, "the entry was edited")
    assert verify(trail).head == trail[1].digest


def test_no_value_and_an_empty_text_differ() -> None:
    assert digest(1, _FACT, START) != digest(1, replace(_FACT, outcome=""), START)


def test_text_cannot_move_from_one_field_to_the_next() -> None:
    one = replace(_FACT, kind='a","b', guest="c")
    other = replace(_FACT, kind="a", guest='b","c')
    assert digest(1, one, START) != digest(1, other, START)


def test_an_edit_with_a_new_digest_is_found_at_the_next_entry() -> None:
    trail = _trail(4)
    trail[1] = following(trail[0], replace(trail[1].fact, guest="other"))
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
    forged: list[AuditEntry] = []
    for _ in range(3):
        forged.append(following(forged[-1] if forged else None, replace(_FACT, user="eve@x")))
    assert verify(forged).broken is None
    assert verify(forged, head).broken is not None
