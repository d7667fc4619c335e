"""Every command of `vmckpt`: where it is, and the first sentence of its help.

`vmckpt --help` is made from this table and loads no command; the others load their own alone. Other
packages add commands by entry points (see util.plugins), as the lab does.
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple


class Place(NamedTuple):
    """A function or a Typer app in a module, and its first sentence."""

    module: str
    name: str
    says: str
    package: str = "vmckpt.cli"


COMMANDS = {
    "hosts": Place("hosts", "hosts", "Show all hosts: versions, memory, guests."),
    "guests": Place("hosts", "guests", "Show all guests of all hosts."),
    "label": Place(
        "hosts", "label", "Give a guest labels, by which policies choose it; they move with it."
    ),
    "doctor": Place("hosts", "doctor", "Examine hosts: is everything there that migrations need?"),
    "migrate": Place("migrate", "migrate", "Move a running guest to another host."),
    "plan": Place("plan", "plan", "Say what a migration would be, and change nothing."),
    "resume": Place(
        "migrate",
        "resume",
        "Go on with a post-copy whose stream broke, or with an evacuation that was paused.",
    ),
    "recover": Place(
        "recover",
        "recover",
        "Put in order what was interrupted: a killed vmckpt, a dead host, a cut link.",
    ),
    "jobs": Place("jobs", "jobs", "Show the jobs that run, or all, the latest first."),
    "job": Place(
        "jobs", "job", "Show everything there is on a job: report, decisions, forecast, requests."
    ),
    "watch": Place("watch", "watch", "Watch a job of another terminal until it ends."),
    "postcopy": Place(
        "jobs",
        "postcopy",
        "Switch a running migration to post-copy: the guest goes on at the target at once.",
    ),
    "cancel": Place("jobs", "cancel", "Cancel a running job: its guest goes on where it was."),
    "pause": Place(
        "jobs",
        "pause",
        "Let the guest of a running migration stand still, so that the migration can end.",
    ),
    "set": Place("jobs", "set_", "Change the limits of a running migration."),
    "policy": Place(
        "policy", "app", "Policies: how migrations are to be done, and which one a guest gets."
    ),
    "dashboard": Place(
        "dashboard",
        "app",
        "Look at hosts, guests and jobs in the terminal, and act on them by keys.",
    ),
    "events": Place(
        "events",
        "app",
        "Show what operations began, told and ended, of all controllers of this journal.",
    ),
    "guard": Place(
        "guard",
        "app",
        "Run a risky command under guard: if it or the check fails, the guest goes back.",
    ),
    "manual": Place(
        "docs", "manual_app", "Write a manual page for every command, from the same text as --help."
    ),
    "prepare": Place(
        "hosts", "prepare_app", "Make a guest ready for fast snapshots and for replication."
    ),
    "run": Place(
        "run",
        "app",
        "Take, copy, verify and prune snapshots as the guests' policies say, until it is stopped.",
    ),
    "schema": Place(
        "docs",
        "schema_app",
        "Print the JSON Schema of what a command prints with --json; without COMMAND, which"
        " have one.",
    ),
    "snapshot": Place(
        "snapshot.app", "app", "Snapshots of memory and disks, in a store that can be proved."
    ),
    "protect": Place(
        "protect",
        "app",
        "Keep a standby of a running guest on another host, a fraction of a second behind.",
    ),
    "unprotect": Place(
        "protect", "unprotect_app", "End a guest's protection; the guest runs on where it is."
    ),
    "failover": Place(
        "protect", "failover_app", "Let a protected guest run on its standby's host."
    ),
    "status": Place(
        "protect",
        "status_app",
        "How protected guests stand: how far the standby is behind, and what an epoch costs.",
    ),
    "evacuate": Place(
        "evacuate", "app", "Move all guests away from a host, so that it can be switched off."
    ),
    "repopulate": Place(
        "evacuate",
        "repopulate_app",
        "Bring back to a host what vmckpt evacuate moved away, and end its maintenance.",
    ),
    "balance": Place(
        "evacuate", "balance_app", "Even out how full hosts are, by moves that pay for themselves."
    ),
    "roll": Place(
        "maintenance",
        "roll_app",
        "Host after host: empty it, run a command on it, wait until it is well, bring guests back.",
    ),
    "maintenance": Place(
        "maintenance", "app", "Which hosts are in maintenance: nothing new is placed on them."
    ),
}


@cache
def places() -> Mapping[str, Place]:
    """All commands, with those of other packages."""
    # Reads what is installed, which takes a while; only --help and names that are not ours need it.
    from vmckpt.util import plugins

    return COMMANDS | dict(plugins.added("vmckpt.commands"))


def place_of(name: str) -> Place | None:
    """Where a command is; other packages are asked only for what is none of ours."""
    return COMMANDS.get(name) or places().get(name)
