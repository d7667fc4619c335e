"""What is shown of policies. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vmckpt.errors import PolicyError
from vmckpt.model.guest import GuestNow, HostNow
from vmckpt.policy import select
from vmckpt.policy.model import Policy
from vmckpt.policy.select import Subject
from vmckpt.units import show_seconds
from vmckpt_tui.columns import Column

UNDECIDED = "(two are equally specific)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A policy, and the guests that get it."""

    policy: Policy
    guests: int | None
    """None: they are being counted."""


def chosen(policies: Sequence[Policy], guest: GuestNow, hosts: Mapping[str, HostNow]) -> str:
    """The name of the policy that a guest gets."""
    host = hosts.get(guest.host)
    subject = Subject(
        guest=guest.name, guest_labels=guest.labels, memory=guest.memory,
        host_labels={} if host is None else host.labels,
    )  # fmt: skip
    try:
        return select.choose(policies, subject).policy.name
    except PolicyError:
        return UNDECIDED


def policy_columns() -> Sequence[Column[Use]]:
    """Of the list of policies."""
    return (
        Column(label="policy", width=16, cell=lambda one: (one.policy.name, ""),
               order=lambda one: one.policy.name),
        Column(label="guests", width=6, right=True, order=lambda one: one.guests or 0,
               cell=lambda one: ("…", "dim") if one.guests is None
               else (f"{one.guests:,}", "" if one.guests else "dim")),
        Column(label="mode", width=10, cell=lambda one: (str(one.policy.mode), "")),
        Column(label="downtime", width=8, right=True,
               cell=lambda one: (show_seconds(one.policy.limits.max_downtime), "")),
        Column(label="post-copy", width=9,
               cell=lambda one: ("yes" if one.policy.may_switch_early else "no", "")),
        Column(label="file", width=10, grows=1, from_width=120,
               cell=lambda one: ("shipped" if one.policy.shipped else str(one.policy.file), "dim")),
        Column(label="what for", width=16, grows=3, cell=lambda one: (one.policy.description, "")),
    )  # fmt: skip
