"""Which operation excludes which: the cells of docs/locking.md, each tried by test_locking.

`python -m tests.lab.locking_table` writes the tables into the document.
"""

from collections.abc import Iterator

from tests.lab.locking_words import Answer, Asked, Cell, Then, Under
from tests.support.paths import ROOT

DOCUMENT = ROOT / "docs/locking.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

REFUSED, WAITS, ALLOWED, HARMS = Answer
GOES_ON = Then("it continues", goes_on=True)
LOCK = "cannot acquire state change lock (held by monitor="
JOBS = (
    Asked.SNAPSHOT, Asked.DISK_SNAPSHOT, Asked.BACKUP, Asked.ATTACH_DISK, Asked.ATTACH_NIC,
    Asked.SETMEM, Asked.SETVCPUS, Asked.RESUME, Asked.SHUTDOWN, Asked.REBOOT, Asked.UNDEFINE,
    Asked.MANAGEDSAVE, Asked.DUMP, Asked.BLOCKCOPY,
)  # fmt: skip
"""What needs libvirt's lock on the guest in every case."""
CANCELLED = Then("cancelled: the guest runs on the source", outcome="cancelled", on="alpha")
FAILED = Then("failed: the guest runs on the source", outcome="failed", on="alpha")
SHUT_OFF = Then("shut-off: the guest is off on both hosts", outcome="shut-off")
ARRIVES = Then("completed: the guest runs on the target", outcome="completed", on="beta")
FORGOTTEN = Then(
    "completed: the guest is paused, so the migration ends at once, and libvirt resumes it on the"
    " target: the suspension is lost",
    outcome="completed",
    on="beta",
)
SOURCE_LEFT = Then(
    "lost: only the source's part of the guest is left, paused", outcome="lost", left="alpha"
)
TARGET_LEFT = Then(
    "lost: only the target's part of the guest is left, hung", outcome="lost", left="beta"
)
SETTLED = Then(
    "the job is recovered first (failed: the guest never left the source), then the guest moves",
    outcome="failed",
    on="beta",
)
ADOPTED = Then(
    "the job has a controller again, which accepts vmckpt cancel: cancelled, the guest runs on the"
    " source",
    outcome="cancelled",
    on="alpha",
)
STAYS = Then("the guest runs on the source; vmckpt recover: failed", outcome="failed", on="alpha")
ELSEWHERE = Then(
    "the guest moves; vmckpt recover: completed, as it runs on the target",
    outcome="completed",
    on="beta",
)
OFF = Then("the guest is off; vmckpt recover: shut-off", outcome="shut-off")

Group = tuple[Answer, int | None, str, Then, tuple[Asked, ...]]
_MOVING: tuple[Group, ...] = (
    (WAITS, 1, LOCK, GOES_ON, JOBS),
    (REFUSED, 1, "another migration job is already running", GOES_ON, (Asked.VIRSH_MIGRATE,)),
    (ALLOWED, 0, "outgoing migration", GOES_ON, (Asked.GUESTS,)),
)
_HELD = "has a job in progress: "
_ON_BOTH = "it is being migrated, or a copy was left behind; nothing was changed"
_ROWS: dict[Under, tuple[Group, ...]] = {
    Under.PRECOPY: (
        *_MOVING,
        (
            REFUSED,
            21,
            _HELD + "outgoing migration",
            GOES_ON,
            (Asked.MIGRATE, Asked.MIGRATE_ELSEWHERE, Asked.PLAN),
        ),
        (REFUSED, 18, "is run by process", GOES_ON, (Asked.RESUME_JOB,)),
        (REFUSED, 18, _ON_BOTH, GOES_ON, (Asked.LABEL,)),
        (ALLOWED, 0, "every job has ended or has a live controller", GOES_ON, (Asked.RECOVER,)),
        (ALLOWED, 0, "limit to 64 MiB/s", GOES_ON, (Asked.SET,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.DEFINE,)),
        (ALLOWED, 0, "cancel", CANCELLED, (Asked.CANCEL,)),
        (HARMS, 0, "", FAILED, (Asked.ABORT, Asked.DESTROY_OTHER)),
        (HARMS, 0, "suspended", FORGOTTEN, (Asked.SUSPEND,)),
        (HARMS, 0, "destroyed", SHUT_OFF, (Asked.DESTROY,)),
    ),
    Under.POSTCOPY: (
        *_MOVING,
        (WAITS, 1, LOCK, GOES_ON, (Asked.SUSPEND, Asked.ABORT)),
        (
            REFUSED,
            21,
            _HELD + "outgoing migration",
            GOES_ON,
            (Asked.MIGRATE, Asked.MIGRATE_ELSEWHERE, Asked.PLAN),
        ),
        (REFUSED, 18, "is run by process", GOES_ON, (Asked.RESUME_JOB,)),
        (REFUSED, 18, _ON_BOTH, GOES_ON, (Asked.LABEL,)),
        (REFUSED, 2, "it cannot be cancelled", GOES_ON, (Asked.CANCEL,)),
        (ALLOWED, 0, "every job has ended or has a live controller", GOES_ON, (Asked.RECOVER,)),
        (ALLOWED, 0, "limit to 64 MiB/s", GOES_ON, (Asked.SET,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.DEFINE,)),
        (HARMS, None, "", SOURCE_LEFT, (Asked.DESTROY,)),
        (HARMS, 0, "destroyed", TARGET_LEFT, (Asked.DESTROY_OTHER,)),
    ),
    Under.ABANDONED: (
        *_MOVING,
        (
            REFUSED,
            21,
            _HELD + "outgoing migration",
            GOES_ON,
            (Asked.MIGRATE, Asked.MIGRATE_ELSEWHERE, Asked.PLAN),
        ),
        (REFUSED, 2, "web1 has no post-copy migration to resume", GOES_ON, (Asked.RESUME_JOB,)),
        (REFUSED, 18, _ON_BOTH, GOES_ON, (Asked.LABEL,)),
        (ALLOWED, 0, "done directly on alpha", GOES_ON, (Asked.SET,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.DEFINE,)),
        (ALLOWED, 0, "done directly on alpha", STAYS, (Asked.CANCEL,)),
        (ALLOWED, 0, "watch the migration until it ends", ADOPTED, (Asked.RECOVER,)),
        (HARMS, 0, "", STAYS, (Asked.ABORT, Asked.DESTROY_OTHER)),
        (HARMS, 0, "suspended", FORGOTTEN, (Asked.SUSPEND,)),
        (HARMS, 0, "destroyed", OFF, (Asked.DESTROY,)),
    ),
    Under.UNSETTLED: (
        (REFUSED, 2, "web1 has no post-copy migration to resume", GOES_ON, (Asked.RESUME_JOB,)),
        (REFUSED, 2, "web1 is not migrating from alpha", GOES_ON, (Asked.CANCEL, Asked.SET)),
        (ALLOWED, 0, "", GOES_ON, (Asked.PLAN, Asked.GUESTS, Asked.LABEL)),
        (ALLOWED, 0, "the guest never left the source", SETTLED, (Asked.MIGRATE,)),
        (ALLOWED, 0, "", ELSEWHERE, (Asked.MIGRATE_ELSEWHERE, Asked.VIRSH_MIGRATE)),
        (ALLOWED, 0, "the guest never left the source", STAYS, (Asked.RECOVER,)),
        (ALLOWED, 0, "", STAYS, (Asked.DISK_SNAPSHOT,)),
        (HARMS, 0, "destroyed", OFF, (Asked.DESTROY,)),
    ),
    Under.BROKEN: (
        (WAITS, 1, LOCK, GOES_ON, JOBS),
        (
            REFUSED,
            21,
            _HELD + "outgoing migration",
            GOES_ON,
            (Asked.MIGRATE, Asked.MIGRATE_ELSEWHERE, Asked.PLAN),
        ),
        (REFUSED, 18, "nothing was changed", GOES_ON, (Asked.LABEL,)),
        (REFUSED, 2, "the target does not answer", GOES_ON, (Asked.RESUME_JOB,)),
        (REFUSED, 2, "it cannot be cancelled", GOES_ON, (Asked.CANCEL,)),
        (REFUSED, 13, "the target does not answer", GOES_ON, (Asked.RECOVER,)),
        (ALLOWED, 0, "done directly on alpha", GOES_ON, (Asked.SET,)),
        (ALLOWED, 11, "outgoing migration", GOES_ON, (Asked.GUESTS,)),
    ),
}
TOLD = Then("it continues; the guest gets the request (lab guests ignore it)", goes_on=True)
STANDS = Then("it continues, and the guest is paused", goes_on=True, stands=True)
TRANSIENT = Then("it continues; the guest is transient afterwards", goes_on=True, transient=True)
ALIVE = Then("the guest keeps running", on="alpha")
GONE = Then("the guest is off")
_NO_JOB = (Asked.RESUME_JOB, Asked.CANCEL, Asked.SET)
_MOVES = (Asked.MIGRATE, Asked.MIGRATE_ELSEWHERE, Asked.PLAN)
_HARMLESS = (
    Asked.RECOVER, Asked.LABEL, Asked.DEFINE, Asked.SETVCPUS, Asked.ATTACH_DISK, Asked.ATTACH_NIC,
)  # fmt: skip


def _saving(job: str, *more: Group) -> tuple[Group, ...]:
    """While libvirt writes the guest's memory to a file."""
    return (
        (WAITS, 1, LOCK, GOES_ON, (*JOBS, Asked.VIRSH_MIGRATE)),
        (REFUSED, 18, f"{job}; nothing was changed", GOES_ON, (Asked.LABEL,)),
        (REFUSED, 21, _HELD + job, GOES_ON, _MOVES),
        (REFUSED, 2, "", GOES_ON, _NO_JOB),
        (ALLOWED, 0, job, GOES_ON, (Asked.GUESTS,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.RECOVER, Asked.DEFINE)),
        *more,
        (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
    )


_SUSPEND_WAITS: Group = (WAITS, 1, LOCK, GOES_ON, (Asked.SUSPEND,))
_ABORTED: Group = (ALLOWED, 0, "", ALIVE, (Asked.ABORT,))
_NOT_ABORTED: Group = (REFUSED, 1, "cannot abort memory-only dump", GOES_ON, (Asked.ABORT,))
_VIRSH_ROWS: dict[Under, tuple[Group, ...]] = {
    Under.VIRSH_MIGRATE: (
        *_MOVING,
        (REFUSED, 21, _HELD + "outgoing migration", GOES_ON, _MOVES),
        (REFUSED, 18, _ON_BOTH, GOES_ON, (Asked.LABEL,)),
        (REFUSED, 2, "", GOES_ON, _NO_JOB),
        (ALLOWED, 0, "", GOES_ON, (Asked.RECOVER, Asked.DEFINE)),
        (ALLOWED, 0, "", ALIVE, (Asked.ABORT,)),
        (HARMS, 0, "destroyed", ALIVE, (Asked.DESTROY_OTHER,)),
        (HARMS, 0, "suspended", Then("it runs on the target", on="beta"), (Asked.SUSPEND,)),
        (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
    ),
    Under.SNAPSHOT: _saving(
        "snapshot", (ALLOWED, 0, "suspended", STANDS, (Asked.SUSPEND,)), _ABORTED
    ),
    Under.SAVE: _saving("save", _SUSPEND_WAITS, _ABORTED),
    Under.DUMP: _saving("dump", _SUSPEND_WAITS, _NOT_ABORTED),
    Under.BACKUP: (
        (
            WAITS,
            1,
            LOCK,
            GOES_ON,
            (
                Asked.SNAPSHOT,
                Asked.DISK_SNAPSHOT,
                Asked.BACKUP,
                Asked.MANAGEDSAVE,
                Asked.DUMP,
                Asked.VIRSH_MIGRATE,
            ),
        ),
        (REFUSED, 21, _HELD + "backup", GOES_ON, _MOVES),
        (REFUSED, 2, "", GOES_ON, _NO_JOB),
        (REFUSED, 1, "domain is already running", GOES_ON, (Asked.RESUME,)),
        (REFUSED, 1, "without the balloon device", GOES_ON, (Asked.SETMEM,)),
        (REFUSED, 1, "block", GOES_ON, (Asked.BLOCKCOPY,)),
        (ALLOWED, 0, "backup", GOES_ON, (Asked.GUESTS,)),
        (ALLOWED, 0, "", GOES_ON, _HARMLESS),
        (ALLOWED, 0, "", TRANSIENT, (Asked.UNDEFINE,)),
        (ALLOWED, 0, "", TOLD, (Asked.SHUTDOWN, Asked.REBOOT)),
        (ALLOWED, 0, "", STANDS, (Asked.SUSPEND,)),
        (ALLOWED, 0, "", ALIVE, (Asked.ABORT,)),
        (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
    ),
    Under.BLOCKCOPY: (
        (REFUSED, 21, _HELD + "block job on vda", GOES_ON, _MOVES),
        (REFUSED, 2, "", GOES_ON, _NO_JOB),
        (
            REFUSED,
            1,
            "already in active block job",
            GOES_ON,
            (Asked.SNAPSHOT, Asked.DISK_SNAPSHOT, Asked.BLOCKCOPY),
        ),
        (
            REFUSED,
            1,
            "domain has active block job",
            GOES_ON,
            (Asked.VIRSH_MIGRATE, Asked.MANAGEDSAVE),
        ),
        (REFUSED, 1, "has a blockjob assigned", GOES_ON, (Asked.BACKUP,)),
        (REFUSED, 1, "domain is already running", GOES_ON, (Asked.RESUME,)),
        (REFUSED, 1, "without the balloon device", GOES_ON, (Asked.SETMEM,)),
        (REFUSED, 1, "no job is active", GOES_ON, (Asked.ABORT,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.GUESTS, *_HARMLESS, Asked.DUMP)),
        (ALLOWED, 0, "", TRANSIENT, (Asked.UNDEFINE,)),
        (ALLOWED, 0, "", TOLD, (Asked.SHUTDOWN, Asked.REBOOT)),
        (ALLOWED, 0, "", STANDS, (Asked.SUSPEND,)),
        (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
    ),
    Under.DISK_SNAPSHOT: (
        (REFUSED, 21, "libvirt does not migrate guests with snapshots", GOES_ON, _MOVES),
        (REFUSED, 2, "", GOES_ON, _NO_JOB),
        (REFUSED, 1, "snapshots", GOES_ON, (Asked.VIRSH_MIGRATE,)),
        (REFUSED, 1, "domain is already running", GOES_ON, (Asked.RESUME,)),
        (ALLOWED, 0, "", GOES_ON, (Asked.GUESTS, *_HARMLESS, Asked.DUMP, Asked.BACKUP)),
        (ALLOWED, 0, "", TOLD, (Asked.SHUTDOWN, Asked.REBOOT)),
        (ALLOWED, 0, "", STANDS, (Asked.SUSPEND,)),
        (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
    ),
}
UNPROTECTED = Then(
    "the guest runs, and its output is not buffered: the standby is invalid; unprotect the guest,"
    " then protect it again",
    alone=True,
    on="alpha",
)
_PROTECTED: tuple[Group, ...] = (
    (REFUSED, 18, "is protected", GOES_ON, (Asked.MIGRATE,)),
    (REFUSED, 21, "block", GOES_ON, (Asked.MIGRATE_ELSEWHERE, Asked.PLAN)),
    (REFUSED, 2, "is a protect job", GOES_ON, _NO_JOB),
    (REFUSED, 1, "already active", GOES_ON, (Asked.VIRSH_MIGRATE,)),
    # For its mirror, or in an epoch's pause because QEMU has let go of the image.
    (REFUSED, 1, "", GOES_ON, (Asked.SNAPSHOT, Asked.DISK_SNAPSHOT, Asked.BACKUP)),
    (REFUSED, 1, "cannot set memory higher than max memory", GOES_ON, (Asked.SETMEM,)),
    (REFUSED, 1, "domain is already running", GOES_ON, (Asked.RESUME,)),
    (REFUSED, 1, "block", GOES_ON, (Asked.BLOCKCOPY,)),
    (REFUSED, 1, "no job is active", GOES_ON, (Asked.ABORT,)),
    (REFUSED, 1, "transient domain", GOES_ON, (Asked.UNDEFINE, Asked.MANAGEDSAVE)),
    (ALLOWED, 0, "protecting", GOES_ON, (Asked.RECOVER,)),
    (
        ALLOWED,
        0,
        "",
        GOES_ON,
        (Asked.LABEL, Asked.GUESTS, Asked.SETVCPUS, Asked.DUMP, Asked.DEFINE),
    ),
    (ALLOWED, 0, "", TOLD, (Asked.SHUTDOWN, Asked.REBOOT)),
    (ALLOWED, 0, "", STANDS, (Asked.SUSPEND,)),
    (ALLOWED, 0, "", UNPROTECTED, (Asked.ATTACH_DISK, Asked.ATTACH_NIC)),
    (HARMS, 0, "destroyed", UNPROTECTED, (Asked.DESTROY_OTHER,)),
    (HARMS, 0, "destroyed", GONE, (Asked.DESTROY,)),
)
_QUICK = (
    (Under.PRECOPY, Asked.MIGRATE),
    (Under.PRECOPY, Asked.MIGRATE_ELSEWHERE),
    (Under.PRECOPY, Asked.RESUME_JOB),
    (Under.PRECOPY, Asked.VIRSH_MIGRATE),
    (Under.PRECOPY, Asked.DESTROY),
    (Under.BLOCKCOPY, Asked.MIGRATE),
)
"""Those that every run tries."""


def _cells() -> Iterator[Cell]:
    for under, groups in (_ROWS | _VIRSH_ROWS | {Under.PROTECTED: _PROTECTED}).items():
        order = (WAITS, REFUSED, ALLOWED, HARMS)
        for answer, code, says, then, asked in sorted(
            groups, key=lambda group: (not group[3].goes_on, order.index(group[0]))
        ):
            for one in asked:
                yield Cell(under, one, answer, code, says, then, (under, one) in _QUICK)


CELLS = tuple(_cells())


_SIGNS = {
    REFUSED: "no",
    WAITS: "no, after 30 s",
    ALLOWED: "yes",
    HARMS: "yes, **harm**",
}
_SHORT = {
    Under.PRECOPY: "vmckpt pre-copy",
    Under.POSTCOPY: "vmckpt post-copy",
    Under.ABANDONED: "vmckpt killed, libvirt continues",
    Under.UNSETTLED: "vmckpt killed, libvirt has ended",
    Under.BROKEN: "vmckpt post-copy broken",
    Under.VIRSH_MIGRATE: "virsh migrate",
    Under.SNAPSHOT: "virsh snapshot",
    Under.DISK_SNAPSHOT: "after disk snapshot",
    Under.BACKUP: "virsh backup",
    Under.BLOCKCOPY: "virsh blockcopy",
    Under.SAVE: "virsh save",
    Under.DUMP: "virsh dump",
    Under.PROTECTED: "protected",
}


def _overview() -> Iterator[str]:
    found = {(cell.under, cell.asked): cell for cell in CELLS}
    yield "| request | " + " | ".join(_SHORT[under] for under in Under) + " |"
    yield "|---" * (len(Under) + 1) + "|"
    for asked in Asked:
        cells = [found.get((under, asked)) for under in Under]
        signs = ["" if cell is None else _SIGNS[cell.answer] for cell in cells]
        yield f"| {asked} | {' | '.join(signs)} |"


def _row(under: Under) -> Iterator[str]:
    yield f"### {under}"
    yield ""
    yield "| request | answer | exit code | message | result |"
    yield "|---|---|---|---|---|"
    groups: dict[tuple[Answer, int | None, str, Then], list[Asked]] = {}
    for cell in CELLS:
        if cell.under is under:
            kind = (cell.answer, cell.code, cell.says, cell.then)
            groups.setdefault(kind, []).append(cell.asked)
    for (answer, code, says, then), asked in groups.items():
        words = f"`{says}`" if says else ""
        ended = "0 or 1" if code is None else code
        yield f"| {', '.join(asked)} | {answer} | {ended} | {words} | {then.text} |"
    yield ""


def table() -> str:
    """An overview, and below it each row in full."""
    lines = [*_overview(), "", *(line for under in Under for line in _row(under))]
    return "\n".join(lines)


def main() -> None:
    """Write the tables into the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
