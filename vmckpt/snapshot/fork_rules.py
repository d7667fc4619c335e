"""Rules of families of forks: names, which forks are meant, and the best of several runs. Pure."""

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count as counted
from itertools import islice
from typing import Any

from vmckpt.errors import BadInput, HostUnreachable, meant, run_doctor, silent_hosts
from vmckpt.units import Bytes, Seconds

TAG = "fork"
"""Tag of a snapshot that was taken for a family; its value is the ID of the family."""
MOST = 256
"""Maximum number of forks in a family."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


class Keep(StrEnum):
    """Which forks stay after a command was run for each."""

    BEST = "best"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """A request to start a family of forks."""

    source: str
    """A running guest, by name or UUID, or a snapshot, by ID, prefix of the ID, or name."""
    count: int = 1
    prefix: str | None = None
    """The forks are named PREFIX-1, PREFIX-2, …; None: GUEST-fork."""
    folder: str | None = None
    """Directory for the forks' disks; None: next to the disks of the original guest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fork:
    """A fork in a family, as its host reports it."""

    uuid: str
    name: str
    runs: bool
    memory: Bytes
    """Memory that the fork does not share with the snapshot."""
    disk: Bytes
    """Disk space that the fork does not share with the snapshot."""

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "uuid": self.uuid, "runs": self.runs,
            "memory_bytes": self.memory, "disk_bytes": self.disk,
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The forks on one host that continue from one snapshot and share its memory and disks."""

    id: str
    host: str
    template: str
    """Name of the guest in the snapshot."""
    snapshot: str
    store: str
    forks: tuple[Fork, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "family": self.id, "host": self.host, "guest": self.template,
            "snapshot": self.snapshot, "store": self.store,
            "forks": [one.as_json() for one in self.forks],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkTree:
    """The families of all hosts."""

    families: tuple[Family, ...]
    errors: Mapping[str, str] = field(default_factory=dict)
    """The errors of hosts whose families are unknown, by host."""

    def as_json(self) -> dict[str, Any]:
        return {
            "families": [one.as_json() for one in self.families],
            "not_reached": [
                {"host": host, "error": error} for host, error in self.errors.items()
            ],
        }  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A command that was run for one fork and has ended."""

    name: str
    """Name of the fork."""
    status: int
    """The command's exit status, or -N if signal N killed the command."""
    took: Seconds
    output: str
    """What the command wrote to stdout; the beginning is missing if it wrote much."""
    errors: str = ""
    """What the command wrote to stderr, likewise."""

    @property
    def score(self) -> float | None:
        """The number on the last line of the output; None if there is no number."""
        last = next((one for one in reversed(self.output.splitlines()) if one.strip()), "").strip()
        if not _NUMBER.fullmatch(last):
            return None
        number = float(last)
        return number if math.isfinite(number) else None

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name, "status": self.status, "took_ms": round(self.took * 1000),
            "score": self.score, "output": self.output, "errors": self.errors,
        }  # fmt: skip


def best(ran: Sequence[Ran]) -> str | None:
    """Return the name of the fork whose command did best; None if no command succeeded.

    `ran`: in the order in which the commands ended. If all successful commands print a number on
    the last line, the highest number is best, and of equal numbers the first. Otherwise the command
    that ended first is best.
    """
    good = [one for one in ran if one.status == 0]
    if not good:
        return None
    scores = [one.score for one in good]
    numbers = [one for one in scores if one is not None]
    return good[scores.index(max(numbers))].name if len(numbers) == len(good) else good[0].name


def names(prefix: str, count: int, taken: Collection[str]) -> tuple[str, ...]:
    """Return names for `count` forks, PREFIX-1, PREFIX-2, …, without the names in `taken`."""
    free = (name for number in counted(1) if (name := f"{prefix}-{number}") not in taken)
    return tuple(islice(free, count))


def check(request: ForkRequest) -> None:
    """Check number and names of the forks. Raises BadInput."""
    if not 1 <= request.count <= MOST:
        raise BadInput(
            f"{request.count} forks were requested; a family has 1 to {MOST}",
            hint="choose another number with --count",
        )
    prefix = request.prefix
    if prefix is not None and ("/" in prefix or not prefix.isprintable() or not prefix.strip()):
        raise BadInput(
            f"{prefix!r} cannot be the name of a guest",
            hint="choose a name without slashes and control characters with --name",
        )


def command_for(command: str, name: str) -> str:
    """Return the shell command for a fork: `{}` is replaced by the fork's name."""
    return command.replace("{}", shlex.quote(name))


def environment(*, name: str, uuid: str, host: str, family: str) -> Mapping[str, str]:
    """Return the environment variables for the command of a fork."""
    return {
        "VMCKPT_GUEST": name,
        "VMCKPT_UUID": uuid,
        "VMCKPT_HOST": host,
        "VMCKPT_FAMILY": family,
    }


def chosen(tree: ForkTree, words: Sequence[str], family: str | None) -> tuple[Family, ...]:
    """Return the families of the named forks, each with only these forks.

    `words`: names or UUIDs of forks; `family`: ID of a family, all of whose forks are meant. Raises
    BadInput if a word names no fork or several, or HostUnreachable if such a fork may be on a host
    that does not answer.
    """
    every = list(_forks(tree))
    uuids = {
        fork.uuid for one in tree.families if one.id == family for fork in one.forks
    }  # fmt: skip
    if family is not None and family not in {one.id for one in tree.families}:
        known = {one.id for one in tree.families}
        raise _unknown(tree, f"no host that answered has a family {family}", family, known)
    for word in words:
        found = [(one, fork) for one, fork in every if word in (fork.uuid, fork.name)]
        if len(found) > 1:
            where = ", ".join(one.host for one, _ in found)
            raise BadInput(f"fork {word} is on several hosts: {where}", hint="name it by its UUID")
        if not found:
            known = {fork.name for _, fork in every}
            raise _unknown(tree, f"{word} is not a fork of a family", word, known)
        uuids.add(found[0][1].uuid)
    return tuple(
        part for one in tree.families
        if (part := _part(one, uuids)).forks
    )  # fmt: skip


def complete(tree: ForkTree, parts: Sequence[Family]) -> tuple[Family, ...]:
    """Return those of `parts` that have all forks of their family."""
    sizes = {one.id: len(one.forks) for one in tree.families}
    return tuple(one for one in parts if len(one.forks) == sizes[one.id])


def unused(tree: ForkTree, gone: Sequence[Family]) -> tuple[tuple[str, str], ...]:
    """Return store and ID of the snapshots that no family uses once the families `gone` are gone.

    Returns none if a host did not answer, because it may have another family.
    """
    if tree.errors:
        return ()
    ids = {one.id for one in gone}
    used = {(one.store, one.snapshot) for one in tree.families if one.id not in ids}
    return tuple(dict.fromkeys(
        place for one in gone if (place := (one.store, one.snapshot)) not in used
    ))  # fmt: skip


def _forks(tree: ForkTree) -> Iterator[tuple[Family, Fork]]:
    for family in tree.families:
        for fork in family.forks:
            yield family, fork


def _part(family: Family, uuids: Collection[str]) -> Family:
    return Family(
        id=family.id, host=family.host, template=family.template, snapshot=family.snapshot,
        store=family.store, forks=tuple(one for one in family.forks if one.uuid in uuids),
    )  # fmt: skip


def _unknown(tree: ForkTree, said: str, word: str, known: Collection[str]) -> Exception:
    if tree.errors:
        return HostUnreachable(
            f"{said}, as far as is known; no answer from {silent_hosts(tree.errors)}",
            host=next(iter(tree.errors)),
            hint=run_doctor(tree.errors),
        )
    return BadInput(f"{said}; nothing was changed", hint=meant(word, known, "run vmckpt fork tree"))
