"""Protect a guest in the reverse direction: the standby takes over the guest's former images.

The image paths are those that the journal recorded for an earlier protection. The image contents
are not trusted: they are compared with the guest's disks, and the differences are sent. Pure.
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
    """The protection whose failover brought the guest to its current host."""

    host: str
    """The host on which the guest ran before."""
    session: str
    images: Mapping[str, str]
    """Image path on that host of each of the guest's disks, by disk name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """What the guest's former host reports."""

    runs: bool
    """The host has a QEMU process of the guest."""
    images: Mapping[str, Image]
    """The guest's images on that host, by disk name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageAdoption:
    """The existing images that the standby takes over."""

    images: Mapping[str, str] = field(default_factory=dict)
    """Image paths by disk name; images for all other disks are created."""
    findings: Sequence[Finding] = ()


def earlier(past: Iterable[tuple[Operation, Sequence[StoredStep]]], host: str) -> Earlier | None:
    """Return the protection whose failover last brought the guest to `host`; None if unknown.

    `past`: the guest's protections with their steps, latest first. The result is also None if the
    guest has since moved to another host.
    """
    for operation, steps in past:
        begun = next((one for one in steps if one.name == Step.PROTECT), None)
        if begun is None or (came := _failed_over(operation)) is None:
            continue
        if came != host or operation.source is None:
            return None  # the guest has since moved to another host
        images: Mapping[str, Mapping[str, str]] = begun.intent.get("images") or {}
        return Earlier(
            host=operation.source, session=str(begun.intent["session"]),
            images=images.get(operation.source, {}),
        )  # fmt: skip
    return None


def _failed_over(operation: Operation) -> str | None:
    """Return the host to which the guest failed over; None if it stayed on its host."""
    told: Mapping[str, Any] = operation.report or {}
    for key in ("failed_over", "runs_on"):
        if told.get(key) not in (None, operation.source):
            return str(told[key])
    return None


def wanted(known: Earlier | None, disks: Iterable[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Return the path and format of each image to examine, by disk name.

    `known`: what the journal records of an earlier protection; `disks`: as the primary's agent
    reports them.
    """
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
    """Return the images on `host` that the standby takes over, with a finding for each disk.

    `before`: None if the host was not queried; `disks`: the disks that are replicated. If `known`
    or `before` is None, or the guest has a QEMU process on the host, there are no images and only
    one finding.
    """
    if known is None or before is None:
        return ImageAdoption(findings=[_warning(
            host, f"the journal has no record of a failover from {host}: all of the guest's disks"
            " are copied",
        )])  # fmt: skip
    if before.runs:
        return ImageAdoption(findings=[Finding(
            code="runs-there", severity=Severity.BLOCKER, where=host,
            text=f"a QEMU process of the guest is still running on {host}",
            hint="run vmckpt recover",
        )])  # fmt: skip
    ours = {disk["source"] for disk in disks}
    images: dict[str, str] = {}
    findings = []
    for disk in disks:
        name = disk["name"]
        image = before.images.get(name)
        if image is None:
            why: str | None = "the journal has no record of a former image"
        elif image.path in ours:
            # On storage that both hosts see, guest and standby would share one file.
            why = f"the guest is using {image.path} now"
        elif (why := standby_setup.why_not(image, int(disk["size"] or 0))) is None:
            images[name] = image.path
            findings.append(_info(host, f"{name}: {image.path} is reused; differences are sent"))
            continue
        findings.append(_warning(host, f"{name}: {why}; the complete disk is copied"))
    return ImageAdoption(images=images, findings=findings)


def _warning(where: str, text: str) -> Finding:
    return Finding(code="image-not-taken", severity=Severity.WARNING, where=where, text=text)


def _info(where: str, text: str) -> Finding:
    return Finding(code="image-taken", severity=Severity.INFO, where=where, text=text)
