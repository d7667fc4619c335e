"""Protections that have ended, as the journal has them."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

from vmckpt.journal.records import Operation, StoredStep
from vmckpt.protection.resync import Earlier

IMAGES = {"alpha": {"vda": "/srv/a.qcow2", "vdb": "/srv/b.raw"}, "beta": {"vda": "/new/a.qcow2"}}
KNOWN = Earlier(host="alpha", session="5e55", images=IMAGES["alpha"])


def past(
    report: Mapping[str, Any] | None, *, source: str = "alpha", target: str = "beta",
    images: Mapping[str, Any] | None = IMAGES, session: str = "5e55", name: str = "protect",
) -> tuple[Operation, Sequence[StoredStep]]:  # fmt: skip
    """A protection that has ended."""
    intent: dict[str, Any] = {"session": session, "primary": source, "backup": target}
    if images is not None:
        intent["images"] = images
    operation = SimpleNamespace(source=source, target=target, report=report)
    return cast("Operation", operation), [
        cast("StoredStep", SimpleNamespace(name=name, intent=intent))
    ]


FAILED_OVER = past({"failed_over": "beta", "why": "silent"})
