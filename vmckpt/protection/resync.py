"""Protecting a guest in the other direction: its standby lies on the images that it had there.

What an earlier protection has left in the journal says where they are. Whatever they hold is
believed in nothing: it is compared with the guest's disks, and what differs is sent. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vmckpt.journal.records import Operation, StoredStep
from vmckpt.model.finding import Finding, Severity
from vmckpt.protection.steps import Step
from vmckpt.replication.backup import standby_setup
from vmckpt.replication.backup.standby_setup import Image


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """The protection by which the guest came to where it runs."""

    host: str
    """Where it ran before."""
    session: str
    images: Mapping[str, str]
    """Paths of its images there, by disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the host where it ran before says."""

    runs: bool
    """A QEMU of the guest is there."""
    images: Mapping[str, Image]
    """By disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAdoption:
    """Which images the standby gets."""

    images: Mapping[str, str] = field(default_factory=dict)
    """By disk; all others are made new."""
    findings: Sequence[Finding] = ()


def earlier(past: Iterable[tuple[Operation, Sequence[StoredStep]]], host: str) -> Earlier | None:
    """The last protection, of those that have ended, that brought the guest to another host, if
    that is `host`; None: nothing is known of one.

    `past`: the guest's, the latest first.
    """
    for operation, steps in past:
        begun = next((one for one in steps if one.name == Step.PROTECT), None)
        if begun is None or (came := _failed_over(operation)) is None:
            continue
        if came != host or operation.source is None:
            return None  # it has gone elsewhere since
        images: Mapping[str, Mapping[str, str]] = begun.intent.get("images") or {}
        return Earlier(
            host=operation.source, session=str(begun.intent["session"]),
            images=images.get(operation.source, {}),
        )  # fmt: skip
    return None


def _failed_over(operation: Operation) -> str | None:
    """Where to, if the guest did not stay where it was."""
    told: Mapping[str, Any] = operation.report or {}
    for key in ("failed_over", "runs_on"):
        if told.get(key) not in (None, operation.source):
            return str(told[key])
    return None


def wanted(known: Earlier | None, disks: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """The images that are to be looked at: path and format, by disk."""
    if known is None:
        return {}
    return {
        disk["name"]: (known.images[disk["name"]], disk["format"])
        for disk in disks
        if disk["name"] in known.images
    }


def decide(
    known: Earlier | None, before: Before | None, disks: Sequence[Mapping[str, Any]], host: str
) -> ImageAdoption:
    """Which of the images on `host` the standby takes, and why not of the others.

    `before`: None if nothing was asked; `disks`: those that are replicated.
    """
    if known is None or before is None:
        return ImageAdoption(findings=[_warning(
            host, "nothing is known of a protection that brought the guest here from"
            f" {host}: all of its disks are copied",
        )])  # fmt: skip
    if before.runs:
        return ImageAdoption(findings=[Finding(
            code="runs-there", severity=Severity.BLOCKER, where=host,
            text=f"a QEMU of the guest is still alive on {host}",
            hint="run vmckpt recover",
        )])  # fmt: skip
    ours = {disk["source"] for disk in disks}
    images: dict[str, str] = {}
    findings = []
    for disk in disks:
        name = disk["name"]
        image = before.images.get(name)
        if image is None:
            why: str | None = "nothing is known of its image there"
        elif image.path in ours:
            # On storage that both hosts see it would be one file for both.
            why = f"{image.path} is what the guest runs on now"
        elif (why := standby_setup.why_not(image, int(disk["size"] or 0))) is None:
            images[name] = image.path
            findings.append(_info(host, f"{name}: {image.path} is taken, and gets what differs"))
            continue
        findings.append(_warning(host, f"{name}: {why}: all of it is copied"))
    return ImageAdoption(images=images, findings=findings)


def _warning(where: str, text: str) -> Finding:
    return Finding(code="image-not-taken", severity=Severity.WARNING, where=where, text=text)


def _info(where: str, text: str) -> Finding:
    return Finding(code="image-taken", severity=Severity.INFO, where=where, text=text)
