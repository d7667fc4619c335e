"""Policies for one guest, from the most to the least specific."""

from collections.abc import Sequence

from tests.support.policies import named
from vmckpt.policy.model import Policy
from vmckpt.policy.select import Chosen, Subject, choose
from vmckpt.units import Bytes

BALANCED = named("balanced", '{guests: ["*"]}', shipped=True)
BY_NAME = named("wan", shipped=True)
WEB1 = Subject(
    guest="web1", guest_labels={"tier": "web", "env": "prod"}, host_labels={"rack": "a1"},
    memory=Bytes(8 << 30),
)  # fmt: skip


def chosen(*policies: Policy, forced: str | None = None, subject: Subject = WEB1) -> Chosen:
    return choose([BALANCED, *policies, BY_NAME], subject, forced)


# Each is more specific than all after it; all are for web1.
LADDER: Sequence[Policy] = (
    named("exact", "{guests: [web1]}"),
    named("two-labels", "{guest_labels: {tier: web, env: prod}}"),
    named("label-and-host", "{guest_labels: {tier: web}, host_labels: {rack: a1}}"),
    named("label-and-glob", "{guest_labels: {tier: web}, guests: [web*]}"),
    named("label", "{guest_labels: {tier: web}}"),
    named("host", "{host_labels: {rack: a1}}"),
    named("both-bounds", "{memory: {at_least: 1GiB, below: 1TiB}}"),
    named("one-bound", "{memory: {at_least: 8GiB}}"),
    named("long-glob", "{guests: ['we?1']}"),
    named("short-glob", "{guests: [w*]}"),
    named("own-default", '{guests: ["*"]}'),
)
