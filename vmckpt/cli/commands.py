"""All commands of `vmckpt`: the location of each command, and the first sentence of its help.

`vmckpt --help` prints this table without loading any command. Other packages, such as the lab, add
commands with entry points (see util.plugins).
"""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple


class Place(NamedTuple):
    """The location of a command (a function or a Typer app), and the first sentence of its help."""

    module: str
    name: str
    says: str
    package: str = "vmckpt.cli"


COMMANDS = {
    "hosts": Place("hosts", "hosts", "List hosts with their versions, memory and guests."),
    "guests": Place("hosts", "guests", "List the guests of all hosts."),
    "label": Place("hosts", "label", "Set or remove labels of a guest."),
    "doctor": Place("hosts", "doctor", "Check that hosts meet the requirements for migration."),
    "migrate": Place("migrate", "migrate", "Move a running guest to another host."),
    "plan": Place("plan", "plan", "Show what a migration would do, without changing anything."),
    "resume": Place(
        "migrate", "resume", "Resume a broken post-copy migration or a paused evacuation."
    ),
    "recover": Place("recover", "recover", "Recover interrupted jobs: finish or undo them."),
    "jobs": Place("jobs", "jobs", "List running jobs, or all jobs, newest first."),
    "job": Place("jobs", "job", "Show a job in detail: report, decisions, forecast, requests."),
    "audit": Place("audit", "app", "Show and verify the audit trail: which user did what."),
    "watch": Place("watch", "watch", "Watch a job until it ends."),
    "postcopy": Place("jobs", "postcopy", "Switch a running migration to post-copy."),
    "cancel": Place("jobs", "cancel", "Cancel a running job."),
    "pause": Place("jobs", "pause", "Pause a migrating guest, or a running evacuation."),
    "set": Place("jobs", "set_", "Change the limits of a running migration."),
    "policy": Place("policy", "app", "Show, check and explain policies."),
    "dashboard": Place(
        "dashboard", "app", "Show hosts, guests and jobs in the terminal, and act on them."
    ),
    "events": Place("events", "app", "Show the events of all jobs in the journal."),
    "guard": Place("guard", "app", "Run a risky command; if it fails, restore the guest."),
    "manual": Place("docs", "manual_app", "Write a manual page for every command."),
    "prepare": Place("hosts", "prepare_app", "Prepare a guest for fast snapshots and replication."),
    "run": Place("run", "app", "Run the service for scheduled snapshots, metrics and alerts."),
    "notify": Place("notify", "app", "Send a test alert to every receiver in the inventory."),
    "schema": Place("docs", "schema_app", "Print the JSON Schema of a command's --json output."),
    "snapshot": Place("snapshot.app", "app", "Take, verify, restore and manage snapshots."),
    "fork": Place("fork", "app", "Start and manage families of forks of a guest."),
    "protect": Place("protect", "app", "Keep a standby of a running guest on another host."),
    "unprotect": Place(
        "protect", "unprotect_app", "End a guest's protection; the guest keeps running."
    ),
    "failover": Place("protect", "failover_app", "Fail a protected guest over to its standby."),
    "status": Place(
        "protect", "status_app", "Show the status of protections: standby, RPO, cost of epochs."
    ),
    "evacuate": Place("evacuate", "app", "Move all guests off a host."),
    "repopulate": Place(
        "evacuate",
        "repopulate_app",
        "Move evacuated guests back to a host and end its maintenance.",
    ),
    "balance": Place(
        "evacuate", "balance_app", "Balance the load across hosts with migrations that pay off."
    ),
    "roll": Place(
        "maintenance", "roll_app", "Maintain hosts in turn: evacuate, run a command, repopulate."
    ),
    "maintenance": Place("maintenance", "app", "Show and set which hosts are in maintenance."),
}


@cache
def places() -> Mapping[str, Place]:
    """Return all commands, including those of other packages."""
    # Listing installed packages takes a while; only --help and unknown names need it.
    from vmckpt.util import plugins

    return COMMANDS | dict(plugins.added("vmckpt.commands"))


def place_of(name: str) -> Place | None:
    """Return the location of a command, or None. Other packages are searched last."""
    return COMMANDS.get(name) or places().get(name)
