"""vmckpt protect, unprotect, failover and status."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import arguments, output
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON, POLICIES, POLICY, seconds
from vmckpt.cli.output import stop_on_signals
from vmckpt.errors import BadInput, Blocked
from vmckpt.model.epoch_cost import Finder
from vmckpt.model.finding import Severity
from vmckpt.policy.model import Failover, Policy
from vmckpt.units import Seconds, parse_seconds, show_bytes, show_count, show_seconds

if TYPE_CHECKING:
    from vmckpt.app import controller
    from vmckpt.app.protection import Request
    from vmckpt.protection.agent_status import ProtectionStatus
    from vmckpt.protection.request import Protected
    from vmckpt.protection.status import Look
    from vmckpt.protection.stop import StopResult
    from vmckpt.protection.test_failover import TestedFailover


def show(done: "TestedFailover", *, runs: bool, json: bool) -> None:
    """Print the result of starting a test copy, if `runs`, or of removing the copy."""
    if json:
        output.print_json({**done.as_json(), "runs": runs})
        return
    took = show_seconds(done.took)
    if not runs:
        output.out.print(f"{done.name} was removed from {done.host} in {took}")
        return
    old = "" if done.age is None else f", {show_seconds(done.age)} old when the copy started"
    output.out.print(
        f"{done.name} is running on {done.host}: a copy of {done.guest} without network, from epoch"
        f" {done.epoch}{old}; the start took {took}"
    )
    output.out.print(f"to inspect the copy: {' or '.join(done.look)}")
    output.out.print(f"to remove the copy: {' or '.join(done.end)}")


def line(test: dict[str, Any]) -> str:
    """Return one line on the state of a test copy, for the status of a protection."""
    name = test.get("name") or "a copy"
    if test["state"] == "failed":
        return f"{name} failed: {test['why']}"
    if test["state"] == "copying":
        return f"creating {name}, {show_seconds(time.time() - test['begun'])} so far"
    since = show_seconds(time.time() - test["since"])
    return f"{name}, a copy of epoch {test['epoch']}, has been running for {since}"


app = typer.Typer(name="protect", rich_markup_mode=None, add_completion=False)
_LOST = Annotated[
    bool,
    typer.Option(
        "--lost-journal", help="The protection's journal is lost: use the reports of its hosts."
    ),
]
unprotect_app = typer.Typer(name="unprotect", rich_markup_mode=None, add_completion=False)
failover_app = typer.Typer(name="failover", rich_markup_mode=None, add_completion=False)
status_app = typer.Typer(name="status", rich_markup_mode=None, add_completion=False)

_AUTO = "auto"


@app.command()
def protect(
    guest: GUEST,
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="HOST", help="Host of the standby.", autocompletion=arguments.hosts
        ),
    ] = None,
    reverse: Annotated[
        bool,
        typer.Option("--reverse", help="After a failover: create the standby on the former host."),
    ] = False,
    interval: Annotated[
        str | None, typer.Option(metavar="TIME|auto", help="Time between epochs, like 100ms.")
    ] = None,
    failover: Annotated[
        Failover | None, typer.Option(help="Whether the failover is automatic.")
    ] = None,
    policy: POLICY = None,
    policies: POLICIES = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory for the standby's images on its host."),
    ] = None,
    ttl: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="Lifetime of the lease, like 2s."),
    ] = None,
    finder: Annotated[
        Finder | None,
        typer.Option(help="How to find changed pages. Default: the best method that works."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check only; change nothing.")] = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Keep a standby of a running guest on another host.

    The guest's memory, devices and disks are copied continuously, so the standby is a fraction of a
    second behind. Network output of the guest is buffered until the standby has the state that
    produced the output. If the guest's host dies, the guest resumes on the standby's host from the
    last complete epoch. Clients have received no output that was produced after that epoch.

    --failover automatic requires a lease store in the inventory, or a fence agent for the guest's
    host. With a lease store, the option permits vmckpt to stop a guest whose host has lost the
    lease. Without a lease store, vmckpt run must be running on another machine, and may power the
    guest's host off, with everything that is running on it. With --failover manual, the standby
    takes over when you run vmckpt failover.

    The protect section of the guest's policy sets the defaults; options given here override them.

    After a failover, --reverse protects the guest with a standby on its former host, once that host
    is up again. The standby reuses the guest's images there, so only differences are copied. An
    image that cannot be reused is reported and copied completely.

    --finder write-tracking tracks the guest's writes with Linux 6.7 or later. --finder soft-dirty
    tracks them with a kernel that has soft-dirty bits, if the memory is not shared. --finder
    compare compares all memory in each epoch; it needs memory in a shared file on tmpfs.

    The command returns when the standby is ready; the protection then continues in the background
    (see vmckpt status). Ctrl-C before the standby is ready ends the protection.

    Examples:

        vmckpt protect web1 --to beta

        vmckpt protect web1 --reverse

        vmckpt protect web1 --to beta --interval 100ms --failover automatic

        vmckpt protect web1 --to beta --dry-run --json
    """
    from vmckpt.app import controller
    from vmckpt.app import policies as app_policies
    from vmckpt.app.protection import Request

    known = controller.load_inventory(inventory)
    shelf, forced = app_policies.load_policies(known, policies, policy)
    wishes: dict[str, Any] = {}
    if interval is not None:
        wishes["interval"] = _interval(interval)
    if failover is not None:
        wishes["failover"] = failover
    if ttl is not None:
        wishes["lease"] = ttl
    request = Request(guest=guest, to=to, policy=forced, wishes=wishes, storage=storage,
                      finder=finder, dry_run=dry_run, reverse=reverse)  # fmt: skip
    done = asyncio.run(_protect(known, shelf, request))
    if json:
        output.print_json(done.as_json())
    else:
        _show(done)
    blockers = [one for one in done.findings if one.severity is Severity.BLOCKER]
    if blockers:
        raise Blocked(
            f"{done.guest} cannot be protected by {done.backup}: {blockers[0].text}",
            hint=blockers[0].hint,
        )


def _interval(text: str) -> Seconds | None:
    if text == _AUTO:
        return None
    try:
        return parse_seconds(text)
    except ValueError as exc:
        raise BadInput(f"--interval: {exc}", hint="use a value like 100ms or 1s, or auto") from None


async def _protect(
    inventory: "controller.Inventory", shelf: Sequence[Policy], request: "Request"
) -> "Protected":
    from vmckpt.app import controller, protection

    stop = stop_on_signals("stopping: undoing the protection")
    told = _Progress()
    caller = controller.Caller(emit=lambda _: None, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, policies=shelf, caller=caller)
    return await protection.protect(acting, request, told)


class _Progress:
    """The progress of the first copy: prints a line whenever the state changes."""

    def __init__(self) -> None:
        self._said = ""

    def __call__(self, found: "ProtectionStatus") -> None:
        status = found.told
        left = status.get("pages_left")
        line = f"{status.get('phase', 'starting')}"
        if left is not None:
            line += f": {show_bytes(int(left) << 12)} of memory left to send"
            line += "" if status.get("disks_ready") else f"; disks: {_disks(status)}"
        if status.get("says"):
            line += f"; problem: {status['says']}"
        if line != self._said:
            self._said = line
            output.say(line)


def _disks(status: Mapping[str, Any]) -> str:
    """Return the progress of disk synchronisation, or the totals once it is complete."""
    if (whole := status.get("disks_bytes")) is None:
        return "no progress yet"
    done, sent = status["disks_compared_bytes"], status["disks_sent_bytes"]
    return f"{show_bytes(done)} of {show_bytes(whole)} compared, {show_bytes(sent)} differed"


def _show(done: "Protected") -> None:
    output.findings(output.out, done.findings)
    if done.status is None:
        if all(one.severity is not Severity.BLOCKER for one in done.findings):
            output.out.print(
                f"{done.guest} on {done.primary} can be protected by {done.backup}: its memory and"
                f" {show_bytes(done.disks_bytes)} of disk data will be copied first; nothing was"
                " changed"
            )
            if done.expected_pause is not None:
                output.out.print(
                    f"each epoch is expected to pause {done.guest} for about"
                    f" {show_seconds(done.expected_pause)}"
                )
        return
    who = "automatically" if done.automatic else "when you run vmckpt failover"
    output.out.print(
        f"{done.guest} on {done.primary} is protected by {done.backup}, which takes over {who};"
        f" ready after {show_seconds(done.took)}"
    )
    if (kept := _lease_kept_by(done.status)) is not None:
        output.out.print(f"the guest's lease is enforced by {kept}")


@unprotect_app.command()
def unprotect(
    guest: GUEST,
    lost_journal: _LOST = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """End a guest's protection; the guest keeps running.

    The standby and its images are removed, and buffered output is released. The protection leaves
    nothing behind on either host, except images that --reverse found there.

    --lost-journal is for a protection that is no longer in any journal. Make sure that this is the
    case: the option also ends a protection that another controller manages with its own journal.

    Examples:

        vmckpt unprotect web1

        vmckpt unprotect web1 --lost-journal
    """
    from vmckpt.app import controller

    known = controller.load_inventory(inventory)
    ended = asyncio.run(_unprotect(known, guest, lost_journal=lost_journal))
    _show_ended(ended, "is no longer protected", json=json)


async def _unprotect(
    inventory: "controller.Inventory", guest: str, *, lost_journal: bool
) -> "StopResult":
    from vmckpt.app import controller, protection

    stop = stop_on_signals("ending the protection cannot be interrupted; it takes only a moment")
    caller = controller.Caller(emit=lambda _: None, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    return await protection.unprotect(acting, guest, lost_journal=lost_journal)


@failover_app.command()
def failover(
    guest: GUEST,
    planned: Annotated[
        bool, typer.Option("--planned", help="Fail over without loss; both hosts must be up.")
    ] = False,
    off: Annotated[
        bool, typer.Option("--host-is-off", help="Confirm that the guest's host is off.")
    ] = False,
    fence: Annotated[
        bool, typer.Option("--fence", help="Power the guest's host off first, even if it answers.")
    ] = False,
    test: Annotated[
        bool, typer.Option("--test", help="Start a test copy of the standby; do not fail over.")
    ] = False,
    end_test: Annotated[bool, typer.Option("--end-test", help="Remove the test copy.")] = False,
    lost_journal: _LOST = False,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Fail a protected guest over to its standby.

    With a lease store, the lease determines whether the standby may take over. Without a lease
    store, the fence agent powers the guest's host off if the host does not answer. The standby
    starts only after the fence agent has reported that the host is off. Without a fence agent, use
    --host-is-off to confirm that the host is off. Switch the host off first: if it is still on, the
    guest runs on two hosts.

    --fence is for a host that hangs but still answers some requests. It powers off the host and
    everything that is running on it.

    --planned requires that both hosts are up: after one last epoch, the guest resumes on the
    standby's host, and nothing is lost.

    --test verifies the standby while the protection continues: a copy of the standby's last epoch
    runs on the standby's host, under another name and with its network links down. Everything that
    the copy writes is discarded.

    Examples:

        vmckpt failover web1

        vmckpt failover web1 --test

        vmckpt failover web1 --end-test

        vmckpt failover web1 --planned

        vmckpt failover web1 --host-is-off

        vmckpt failover web1 --fence
    """
    from vmckpt.app import controller

    if planned + off + fence + test + end_test > 1:
        raise BadInput(
            "--planned, --host-is-off, --fence, --test and --end-test are mutually exclusive",
            hint="use one of them",
        )
    if lost_journal and not off:
        raise BadInput(
            "--lost-journal requires --host-is-off",
            hint=f"if the guest's host answers, run vmckpt unprotect {guest} --lost-journal",
        )
    known = controller.load_inventory(inventory)
    if test or end_test:
        tested = asyncio.run(_test(known, guest, begin=test))
        show(tested, runs=test, json=json)
        return
    how = {"planned": planned, "dead": off, "fence": fence, "lost_journal": lost_journal}
    ended = asyncio.run(_failover(known, guest, **how))
    _show_ended(ended, f"is running on {ended.runs_on}", json=json)
    if not json:
        then = f"run vmckpt protect {ended.guest} --reverse"
        output.out.print(f"the guest is unprotected; once its former host is up, {then}")


async def _failover(inventory: "controller.Inventory", guest: str, **how: bool) -> "StopResult":
    from vmckpt.app import controller, protection

    stop = stop_on_signals("stopping: the failover may still happen; see vmckpt status")
    caller = controller.Caller(emit=lambda _: None, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    return await protection.failover(acting, guest, **how)


async def _test(inventory: "controller.Inventory", guest: str, *, begin: bool) -> "TestedFailover":
    from vmckpt.app import controller, protection

    stop = stop_on_signals(
        "stopping: removing the copy"
        if begin
        else "ending the test cannot be interrupted; it takes only a moment"
    )
    caller = controller.Caller(emit=lambda _: None, warn=output.say, stop=stop)
    acting = controller.Controller(inventory=inventory, caller=caller)
    return await (protection.test if begin else protection.end_test)(acting, guest)


def _show_ended(ended: "StopResult", what: str, *, json: bool) -> None:
    if json:
        output.print_json(ended.as_json())
        return
    output.out.print(f"{ended.guest} {what} ({ended.why}); took {show_seconds(ended.took)}")
    if ended.fenced is not None:
        output.out.print(f"{ended.fenced.host} is off and stays off until you switch it on")


@status_app.command()
def status(
    guest: Annotated[
        str | None,
        typer.Argument(
            metavar="GUEST",
            help="Name or UUID of the guest. Default: all guests.",
            autocompletion=arguments.guests,
        ),
    ] = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show the status of protections: standby, RPO, cost of epochs.

    "Output waits" shows how long a packet from the guest is buffered on average: half of the epoch
    in which it is sent, the pause, and the time until the backup has the epoch. It also shows the
    worst case of the last 600 epochs. To follow the status, use vmckpt watch GUEST.

    Examples:

        vmckpt status

        vmckpt status web1 --json
    """
    from vmckpt.app import controller, protection

    known = controller.load_inventory(inventory)
    found = asyncio.run(protection.status(known, guest))
    if json:
        output.print_json(list(found))
        return
    if not found:
        output.out.print("no guest is protected")
    for one in found:
        _show_status(one)


def _show_status(one: dict[str, Any]) -> None:
    from vmckpt.protection import status as protection_status

    ours = one["says"].get(one["primary"]) or {}
    theirs = one["says"].get(one["backup"]) or {}
    seen = protection_status.parse_status(one)
    unknown = seen.phase == protection_status.UNKNOWN
    phase = ours.get("error") or seen.phase if unknown else seen.phase
    who = protection_status.decided_by(one)
    output.out.print(
        output.styled("bold", f"{one['guest']}:"),
        f"{phase}, {one['primary']} → {one['backup']}, failover {who}",
    )
    rows = output.table("", "")
    rows.show_header = False
    if one.get("watch_is_kept") is False:
        rows.add_row("problem", "no failure detector: start vmckpt run on another machine")
    for label, value in _rows(ours, theirs, seen):
        rows.add_row(label, value)
    output.out.print(rows)


def _rows(ours: dict[str, Any], theirs: dict[str, Any], seen: "Look") -> list[tuple[str, str]]:
    then = [] if seen.next_step is None else [("next", seen.next_step)]
    if seen.end is not None:
        return [("ended", seen.end), *then]
    ready = "ready" if seen.ready else "not ready"
    found = [("standby", f"{ready}: {seen.ready_why}"), *then]
    if (test := theirs.get("test")) is not None:
        found.append(("test", line(test)))
    if ours.get("says"):
        found.append(("problem", str(ours["says"])))
    if ours.get("outcome"):
        found.append(("why", str(ours.get("why"))))
    if ours.get("disks_bytes") is not None:
        found.append(("disks", _disks(ours)))
    if ours.get("epoch") is not None:
        found.append(("epoch", str(ours["epoch"])))
    if ours.get("rpo_s") is not None and ours.get("phase") != "alone":
        worst = show_seconds(ours["rpo_worst_s"])
        found.append(("behind (RPO)", f"{show_seconds(ours['rpo_s'])}, worst {worst}"))
    found += _choices(ours)
    if (median := ours.get("median")) is not None:
        found += _medians(median, ours)
    return found


def _choices(ours: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the settings that the protection chose, with the reasons."""
    found = []
    if ours.get("interval_s") is not None:
        why = ours.get("interval_why")
        found.append(("interval", f"{show_seconds(ours['interval_s'])} ({why})"))
    if ours.get("finder") is not None:
        found.append(("dirty tracking", f"{ours['finder']} ({ours['finder_why']})"))
    if (kept := _lease_kept_by(ours)) is not None:
        found.append(("lease enforced by", kept))
    return found


def _lease_kept_by(ours: dict[str, Any]) -> str | None:
    """Return what enforces the lease, and why the kernel does not; None if there is no lease."""
    if ours.get("enforced_by") is None:
        return None
    why = ours.get("enforced_why")
    return str(ours["enforced_by"]) + (f" (not by the kernel: {why})" if why else "")


def _medians(median: dict[str, Any], ours: dict[str, Any]) -> list[tuple[str, str]]:
    parts = [
        f"{key.removeprefix('pause_').removesuffix('_s').replace('_', ' ')} {show_seconds(took)}"
        for key, took in median.items()
        if key.startswith("pause_") and key != "pause_s"
    ]
    return [
        ("pause", f"{show_seconds(median['pause_s'])}, p99 {show_seconds(ours['pause_p99_s'])}"),
        ("pause parts", ", ".join(parts)),
        ("output waits", _output(ours)),
        ("sent per epoch", f"{show_bytes(median['bytes'])}, {median['pages']:.0f} pages"),
        ("guest's clock", _clock(ours)),
    ]


def _clock(ours: dict[str, Any]) -> str:
    behind = f"{show_seconds(ours['guest_clock_behind_s'])} behind"
    if (times := ours.get("guest_clock_corrected")) is None:
        return f"{behind}; not corrected by a guest agent"
    return f"{behind}; corrected {show_count(times, 'time')}"


def _output(ours: dict[str, Any]) -> str:
    """Return how long output is buffered, and how many packets were lost."""
    mean = ours.get("output_delay_s")
    told = "–" if mean is None else show_seconds(mean)
    told += f", worst {show_seconds(ours['output_delay_worst_s'])}"
    lost = ours.get("packets_lost")
    return f"{told}; {show_count(lost, 'packet')} lost: QEMU's buffer was full" if lost else told
