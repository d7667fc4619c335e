"""Who keeps whom away in a store: the cells of docs/locking.md, each tried by test_store_locking.

`python -m tests.support.store_locking` writes the table into the document.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs/locking.md"
BEGIN, END = "<!-- store table: begin -->\n", "<!-- store table: end -->\n"


class Work(StrEnum):
    """What is under way in a store."""

    WRITE = "create, copy or import into it (`locks/write-…`)"
    DELETE = "delete or prune of a snapshot (`locks/delete-…`)"
    GC = "gc (`locks/gc`)"
    REPAIR = "verify --repair (`locks/gc`)"
    READ = "restore, verify, export or copy out of it (no lock)"


class Ask(StrEnum):
    """What somebody asks for meanwhile; the snapshot is the one that is deleted or read."""

    CREATE = "create"
    COPY = "copy into it"
    IMPORT = "import"
    VERIFY = "verify --deep"
    EXPORT = "export"
    PIN = "pin"
    DELETE_OTHER = "delete of another"
    DELETE = "delete of the same"
    PRUNE = "prune"
    ROTATE = "keys rotate"
    GC = "gc"
    REPAIR = "verify --repair"


@dataclass(frozen=True, slots=True)
class Cell:
    """What becomes of it."""

    work: Work
    ask: Ask
    code: int = 0
    says: str = ""
    note: int = 0
    """Which of the remarks below the table."""


NOTES = (
    "Packs that the writer relies on stay: a deletion mark that is not in the writer's lock is not"
    " carried out.",
    "pin writes the pin, then looks for a deletion; delete writes its lock, then looks for a pin:"
    " one of the two gives way.",
    "The command that removes the manifest first deletes the snapshot; the other command may find"
    " that the snapshot is gone.",
    "Objects that are being read may be gone after two collections, each with its grace time (one"
    " day by default): pin the snapshot before a restore that takes longer.",
    "Wraps are replaced as a whole: a reader gets either the old or the new wraps. A snapshot that"
    " is being created can be opened with a new key only after the next rotation.",
)
_HELD = "is already running a garbage collection or repair"
_SPECIAL = {
    (Work.WRITE, Ask.GC): Cell(Work.WRITE, Ask.GC, note=1),
    (Work.DELETE, Ask.PIN): Cell(Work.DELETE, Ask.PIN, 45, "or it is being deleted", 2),
    (Work.DELETE, Ask.DELETE): Cell(Work.DELETE, Ask.DELETE, note=3),
    (Work.READ, Ask.DELETE): Cell(Work.READ, Ask.DELETE, note=4),
    (Work.READ, Ask.GC): Cell(Work.READ, Ask.GC, note=4),
    **{
        (work, ask): Cell(work, ask, 40, _HELD)
        for work in (Work.GC, Work.REPAIR)
        for ask in (Ask.GC, Ask.REPAIR)
    },
    **{(work, Ask.ROTATE): Cell(work, Ask.ROTATE, note=5) for work in (Work.WRITE, Work.READ)},
}
CELLS = tuple(_SPECIAL.get((work, ask), Cell(work, ask)) for work in Work for ask in Ask)


def table() -> str:
    """The table and its remarks."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| request | " + " | ".join(Work) + " |"
    yield "|---" * (len(Work) + 1) + "|"
    for ask in Ask:
        yield f"| {ask} | {' | '.join(_sign(one) for one in CELLS if one.ask is ask)} |"
    yield ""
    for number, note in enumerate(NOTES, 1):
        yield f"{number}. {note}"
    yield ""


def _sign(cell: Cell) -> str:
    said = "yes" if cell.code == 0 else f"no, exit code {cell.code}: `{cell.says}`"
    return f"{said} ({cell.note})" if cell.note else said


def main() -> None:
    """Write the table into the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
