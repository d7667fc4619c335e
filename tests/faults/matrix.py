"""Every fault at every moment, and how it must end. Data; test_matrix.py does it.

What decides: the guest runs on in the QEMU that has it. Who dies with the guest in it takes it
along; its disk stays. Nobody else's death may end it.
"""

from dataclasses import dataclass

from vmckpt_lab.command_runner import Moment
from vmckpt_lab.faults.scenarios import Fault
from vmckpt_lab.faults.trial import Ends

PREFLIGHT, SETUP, FIRST, LATE, SWITCHOVER, POST_COPY, CLEANUP = Moment


@dataclass(frozen=True, slots=True)
class Cell:
    """One fault at one moment."""

    fault: Fault
    moment: Moment
    ends: Ends
    quick: bool = False
    """Quick and sure enough for every run."""
    often: bool = False
    """For every long run."""

    def __str__(self) -> str:
        return f"{self.fault}-{self.moment}"


@dataclass(frozen=True, slots=True)
class Stage:
    """A guest and an order that make a moment long enough to be hit."""

    memory: str = "128MiB"
    dirty: str = "16MiB@20MiB/s"
    link: str | None = "200mbit"
    mode: str = "precopy"
    max_downtime: str = "300ms"


STAGES = {
    PREFLIGHT: Stage(),
    SETUP: Stage(),
    FIRST: Stage(),
    # No faster: QEMU 7.2 under TCG loses writes in a long pass of a guest that writes 80 MiB/s.
    LATE: Stage(dirty="24MiB@35MiB/s", max_downtime="100ms"),
    # All that is written again and again is sent while it stands still: two seconds.
    SWITCHOVER: Stage(memory="160MiB", dirty="56MiB@90MiB/s", max_downtime="10s"),
    POST_COPY: Stage(memory="192MiB", dirty="72MiB@60MiB/s", mode="postcopy"),
    CLEANUP: Stage(link=None),
}

_STAYS, _MOVES, _LIVES, _GONE = Ends.STAYS, Ends.MOVES, Ends.LIVES, Ends.GONE
_BEFORE = (PREFLIGHT, SETUP, FIRST, LATE, SWITCHOVER)

_ROWS: dict[Fault, dict[Moment, Ends]] = {
    Fault.CONTROLLER_KILLED: {
        PREFLIGHT: _STAYS, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _MOVES,
    },
    Fault.SOURCE_LIBVIRTD: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _LIVES,
    },
    Fault.TARGET_LIBVIRTD: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _LIVES,
    },
    Fault.TARGET_QEMU: {
        SETUP: _STAYS, FIRST: _STAYS, LATE: _STAYS, SWITCHOVER: _STAYS, POST_COPY: _GONE,
        CLEANUP: Ends.LIVES_OR_GONE,
    },
    Fault.SOURCE_QEMU: {
        PREFLIGHT: _GONE, SETUP: _GONE, FIRST: _GONE, LATE: _GONE, SWITCHOVER: _GONE,
        POST_COPY: _GONE,
    },
    Fault.TARGET_OFF: {
        PREFLIGHT: _STAYS, SETUP: _STAYS, FIRST: _STAYS, LATE: _STAYS, SWITCHOVER: _STAYS,
        POST_COPY: _GONE, CLEANUP: Ends.LIVES_OR_GONE,
    },
    Fault.SOURCE_OFF: {
        PREFLIGHT: _GONE, SETUP: _GONE, FIRST: _GONE, LATE: _GONE, SWITCHOVER: _GONE,
        POST_COPY: _GONE, CLEANUP: Ends.LIVES_OR_GONE,
    },
    Fault.TARGET_CUT: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _LIVES,
    },
    Fault.SOURCE_CUT: {FIRST: _LIVES, SWITCHOVER: _LIVES, POST_COPY: _MOVES},
    Fault.CUT_FOR_GOOD: {SETUP: _LIVES, FIRST: _LIVES, SWITCHOVER: _LIVES, POST_COPY: _MOVES},
    Fault.DISK_FULL: {SETUP: _STAYS, FIRST: _STAYS},
    Fault.MEMORY_FULL: {SETUP: _STAYS},
    Fault.JOURNAL_FULL: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _MOVES,
    },
    Fault.CLOCK_AHEAD: {
        PREFLIGHT: _MOVES, SETUP: _MOVES, FIRST: _MOVES, LATE: _MOVES, SWITCHOVER: _MOVES,
        POST_COPY: _MOVES,
    },
    Fault.CLOCK_BACK: {FIRST: _MOVES, SWITCHOVER: _MOVES, POST_COPY: _MOVES},
    Fault.TWO_SAME: {
        PREFLIGHT: _MOVES, SETUP: _MOVES, FIRST: _MOVES, LATE: _MOVES, SWITCHOVER: _MOVES,
        POST_COPY: _MOVES,
    },
    Fault.TWO_OTHER: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _LIVES,
    },
    Fault.POSTGRES: {
        PREFLIGHT: _LIVES, SETUP: _LIVES, FIRST: _LIVES, LATE: _LIVES, SWITCHOVER: _LIVES,
        POST_COPY: _MOVES, CLEANUP: _MOVES,
    },
}  # fmt: skip

_QUICK = {
    (Fault.CONTROLLER_KILLED, FIRST),
    (Fault.TARGET_QEMU, FIRST),
    (Fault.SOURCE_OFF, FIRST),
}
_OFTEN = {
    (Fault.CONTROLLER_KILLED, SETUP),
    (Fault.CONTROLLER_KILLED, POST_COPY),
    (Fault.TARGET_LIBVIRTD, FIRST),
    (Fault.JOURNAL_FULL, FIRST),
    (Fault.TWO_OTHER, FIRST),
}

MATRIX = tuple(
    Cell(fault, moment, ends, (fault, moment) in _QUICK, (fault, moment) in _OFTEN)
    for fault, row in _ROWS.items()
    for moment, ends in row.items()
)

# Faults that reach into libvirt's own cleanup, which is over when the controller begins its own.
INSIDE = frozenset(Fault) - {
    Fault.CONTROLLER_KILLED, Fault.JOURNAL_FULL, Fault.POSTGRES, Fault.TWO_SAME, Fault.TWO_OTHER,
    Fault.CLOCK_AHEAD, Fault.CLOCK_BACK,
}  # fmt: skip
