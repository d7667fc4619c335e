"""Select the policy for a guest. Pure.

All conditions of a policy's `select` must hold. Of the matching policies, the most specific one is
used. Policies are compared by these criteria, in this order:

1. the guest's exact name, without wildcards;
2. the number of guest labels;
3. the number of host labels;
4. the number of bounds on memory;
5. the number of literal characters in the matching glob;
6. their origin: an operator's own policy takes precedence over a shipped policy.

If two policies are equal in all six, a PolicyError names both files, because a guess could move a
guest in an unintended way. A policy that is requested by name is used regardless of its `select`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from vmckpt.errors import PolicyError
from vmckpt.policy.model import Policy, Select
from vmckpt.units import Bytes, show_bytes
from vmckpt.util.config_file import likely

DEFAULT = "balanced"
"""The policy to use if no policy matches."""

_WILDCARD = re.compile(r"\*|\?|\[.+?\]")

Rank = tuple[bool, int, int, int, int, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A guest that needs a policy."""

    guest: str
    guest_labels: Mapping[str, str]
    host_labels: Mapping[str, str]
    """Labels of the host that the guest is on."""
    memory: Bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A policy that was not chosen, and why."""

    policy: Policy
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The policy that was chosen for a guest, and why."""

    policy: Policy
    why: tuple[str, ...]
    passed_over: tuple[PassedOver, ...]


def choose(policies: Sequence[Policy], subject: Subject, forced: str | None = None) -> Chosen:
    """Choose the policy for a guest. `forced`: the name of a policy to use instead.

    Raises PolicyError if no policy has this name, or if two policies are equally specific.
    """
    if forced is not None:
        found = by_name(policies, forced)
        return Chosen(
            policy=found,
            why=("it was requested by name",),
            passed_over=_others(policies, found, f"{found.name} was requested by name"),
        )
    ranked = sorted(
        ((rank, policy) for policy in policies if (rank := _rank(policy, subject)) is not None),
        key=lambda one: one[0],
        reverse=True,
    )
    if not ranked:
        found = by_name(policies, DEFAULT)
        why = f"no policy matches {subject.guest}, and {DEFAULT} is the default"
        passed = tuple(
            PassedOver(policy=one, why=_mismatch(one.select, subject) or "")
            for one in policies
            if one is not found
        )
        return Chosen(policy=found, why=(why,), passed_over=passed)
    (best, found), *rest = ranked
    if rest and rest[0][0] == best:
        raise PolicyError(
            f"{found.file} and {rest[0][1].file} are equally specific for {subject.guest}",
            hint="add a condition to the select of one policy, or choose a policy with --policy",
        )
    return Chosen(
        policy=found,
        why=_matches(found.select, subject),
        passed_over=tuple(
            PassedOver(policy=one, why=_mismatch(one.select, subject) or _less(one, found, subject))
            for one in policies
            if one is not found
        ),
    )


def by_name(policies: Sequence[Policy], name: str) -> Policy:
    """Return the named policy. Raises PolicyError, with a similar name or the known names."""
    for policy in policies:
        if policy.name == name:
            return policy
    raise PolicyError(f"no policy {name!r}{likely(name, [one.name for one in policies])}")


def _rank(policy: Policy, subject: Subject) -> Rank | None:
    """Return how specific a policy is for a guest, or None if it does not match."""
    select = policy.select
    if _mismatch(select, subject) is not None:
        return None
    globs = _like(subject.guest, select.guests)
    return (
        any(glob == subject.guest for glob in globs),
        len(select.guest_labels),
        len(select.host_labels),
        sum(bound is not None for bound in (select.at_least, select.below)),
        max((len(_WILDCARD.sub("", glob)) for glob in globs), default=0),
        not policy.shipped,
    )


def _like(name: str, globs: Sequence[str]) -> list[str]:
    """Return the globs that match a name.

    A glob also matches an identical name, because a name may contain brackets.
    """
    return [glob for glob in globs if glob == name or fnmatchcase(name, glob)]


def _mismatch(select: Select, subject: Subject) -> str | None:
    """Describe the first condition that does not hold. Returns None if all conditions hold."""
    if select.by_name_only:
        return "it is used only if requested by name"
    if select.guests and not _like(subject.guest, select.guests):
        return f"the guest's name does not match {' or '.join(select.guests)}"
    for whose, wanted, labels in (
        ("guest", select.guest_labels, subject.guest_labels),
        ("host", select.host_labels, subject.host_labels),
    ):
        for key, value in wanted:
            if labels.get(key) != value:
                has = f"it is {labels[key]}" if key in labels else "it is missing"
                return f"the {whose}'s label {key} is not {value}: {has}"
    if select.at_least is not None and subject.memory < select.at_least:
        return f"the guest has less memory than {show_bytes(select.at_least)}"
    if select.below is not None and subject.memory >= select.below:
        return f"the guest has {show_bytes(select.below)} of memory or more"
    return None


def _matches(select: Select, subject: Subject) -> tuple[str, ...]:
    """Describe the conditions of a matching policy, one clause each."""
    globs = _like(subject.guest, select.guests)
    found = [f"the guest's name {subject.guest} matches {' and '.join(globs)}"] if globs else []
    found += [f"the guest's label {key} is {value}" for key, value in select.guest_labels]
    found += [f"the host's label {key} is {value}" for key, value in select.host_labels]
    memory = show_bytes(subject.memory)
    if select.at_least is not None:
        found.append(f"the guest's memory, {memory}, is at least {show_bytes(select.at_least)}")
    if select.below is not None:
        found.append(f"the guest's memory, {memory}, is below {show_bytes(select.below)}")
    return tuple(found) or ("it applies to all guests",)


_REASONS = (
    "{} names the guest exactly",
    "{} matches more guest labels",
    "{} matches more host labels",
    "{} matches more bounds on memory",
    "{} has a matching glob with more literal characters",
    "{} is the operator's own policy, and this policy is shipped with vmckpt",
)


def _less(policy: Policy, winner: Policy, subject: Subject) -> str:
    """Return why `winner` is more specific than another matching policy."""
    mine, best = _rank(policy, subject), _rank(winner, subject)
    if mine is None or best is None:
        return ""
    which = next(i for i, (one, other) in enumerate(zip(mine, best, strict=True)) if one != other)
    return _REASONS[which].format(winner.name)


def _others(policies: Sequence[Policy], found: Policy, why: str) -> tuple[PassedOver, ...]:
    return tuple(PassedOver(policy=one, why=why) for one in policies if one is not found)
