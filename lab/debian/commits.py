"""The ledger of a Debian guest: the commits that its database acknowledged to an outside client.

The client (debian/client.py) appends a line to a file for each commit: the number and the time of
the acknowledgement, in monotonic seconds. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile, pairwise

from vmckpt_lab.ledger import Audit, Entry

_SHOWN = 5
"""The most missing commits that are named."""


@dataclass(frozen=True, slots=True)
class Database:
    """The state of the database, read in one transaction."""

    numbers: Sequence[int]
    """The numbers that the client committed."""
    sums: Sequence[int]
    """Balances of pgbench's accounts, tellers, branches and history: equal in every transaction."""
    broken_pages: int
    """Number of pages whose checksum was wrong when they were read."""


def acknowledged(text: str) -> list[tuple[int, float]]:
    """Return the numbers in a client's file, each with the time of its acknowledgement."""
    lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [(int(line[0]), float(line[1])) for line in lines if line[0] != "error"]


def longest_gap(text: str, since: float, until: float) -> float:
    """Return the longest time without an acknowledgement, in seconds.

    `text`: the client's file; `since`, `until`: the window, in monotonic seconds.
    """
    inside = [at for _, at in acknowledged(text) if since < at < until]
    times = [since, *inside, until]
    return max(after - before for before, after in pairwise(times))


def judge(guest: str, text: str, found: Database) -> Audit:
    """Compare the client's file with the database.

    `text`: the content of the file, read before the database; `found`: the database's content.
    """
    promised = [number for number, _ in acknowledged(text)]
    missing = sorted(set(promised) - set(found.numbers))
    # Before its first commit, the client was waiting for the guest to boot.
    booted = dropwhile(lambda line: line.startswith("error "), text.splitlines())
    errors = sum(line.startswith("error ") for line in booted)
    first = ", ".join(map(str, missing[:_SHOWN])) + (", …" if len(missing) > _SHOWN else "")
    shown = f", {len(missing)} of them missing ({first})" if missing else ", none missing"
    entries = (
        Entry(
            name="commits",
            whole=not missing and promised != [],
            text=f"{len(promised)} acknowledged{shown}; the client had {errors} errors",
        ),
        Entry(
            name="balances",
            whole=len(set(found.sums)) == 1,
            text=f"accounts, tellers, branches and history sum to {sorted(set(found.sums))}",
        ),
        Entry(
            name="pages",
            whole=found.broken_pages == 0,
            text=f"{found.broken_pages} read with a wrong checksum",
        ),
    )
    return Audit(guest=guest, entries=entries)
