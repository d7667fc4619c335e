"""vmckpt audit: the audit trail in the journal."""

import time
from typing import TYPE_CHECKING, Annotated

import typer

from vmckpt.cli import output
from vmckpt.cli.arguments import JSON, guests, help_alone, seconds
from vmckpt.errors import AuditBroken
from vmckpt.journal import wording
from vmckpt.units import Seconds

if TYPE_CHECKING:
    from vmckpt.journal.audit_chain import Actor, AuditEntry

app = typer.Typer(name="audit", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def audit_options(context: typer.Context) -> None:
    """Show and verify the audit trail: which user did what.

    Each entry contains a digest of itself and of the previous entry. Pruning of the journal keeps
    the trail.
    """
    help_alone(context)


@app.command("list")
def list_(
    guest: Annotated[
        str | None,
        typer.Option(
            metavar="GUEST", help="Only entries of this guest or host.", autocompletion=guests
        ),
    ] = None,
    since: Annotated[
        Seconds | None,
        typer.Option(parser=seconds, metavar="TIME", help="How far back to start, like 24h."),
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=100_000, help="Maximum number of entries, the latest.")
    ] = 100,
    json: JSON = False,
) -> None:
    """List the entries of the trail, the oldest first.

    The column "user" also shows which user became root with sudo or su. A process with root's
    rights can forge this name.

    Examples:

        vmckpt audit list --guest web1 --since 24h

        vmckpt audit list --json
    """
    from vmckpt.journal import jobs

    with jobs.open_journal(read_only=True) as journal:
        start = None if since is None else journal.now() - since
        found = journal.audit(guest=guest, since=start, limit=limit)
    if json:
        output.print_json([one.as_json() for one in found])
        return
    if not found:
        output.say("the audit trail has no such entry")
        return
    now = time.time()
    table = output.table(">entry", "time", "user", "command", "what", "job", "guest", "from → to")
    for one in found:
        table.add_row(*_row(one, now))
    output.out.print(table)


def _row(entry: "AuditEntry", now: float) -> list[str]:
    actor, deed = entry.fact.actor, entry.fact.deed
    at = entry.fact.at_ms
    what = (deed.what, deed.step, deed.outcome)
    return [
        str(entry.seq),
        # An edited entry may contain anything.
        wording.clock(at / 1000, now) if isinstance(at, int) else str(at),
        _user(actor),
        str(actor.command),
        " ".join(str(one) for one in what if one is not None),
        str(deed.job or "–"),
        str(deed.guest or "–"),
        f"{deed.source or '–'} → {deed.target}" if deed.target else str(deed.source or "–"),
    ]


def _user(actor: "Actor") -> str:
    user = f"{actor.user}@{actor.host}"
    return user if actor.sudo_user is None else f"{user} (by {actor.sudo_user})"


@app.command()
def verify(
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="Digest that the trail must contain, from systemd's journal."
        ),
    ] = None,
    json: JSON = False,
) -> None:
    """Verify the hash chain of the audit trail.

    If an entry was edited, removed or inserted, the command names the first such entry and exits
    with 28. A user that can write to the journal can also compute a new chain. Only --head detects
    that: give it the VMCKPT_AUDIT_HEAD of an entry in systemd's journal, preferably of a log
    server.

    Examples:

        vmckpt audit verify

        vmckpt audit verify --json
    """
    from vmckpt.journal import jobs

    if head is not None:
        head = _digest(head)
    with jobs.open_journal(read_only=True) as journal:
        found, name = journal.verify_audit(head), str(journal)
    if json:
        output.print_json(found.as_json())
    if found.broken is not None:
        raise AuditBroken(
            f"{name}: the audit trail is broken at entry {found.broken.seq}: {found.broken.why}",
            hint="compare it with systemd's journal (see docs/security.md)",
        )
    if not json:
        count = f"{found.entries:,} {'entry' if found.entries == 1 else 'entries'}"
        output.out.print(f"{count}, unbroken; head {found.head}", soft_wrap=True)


def _digest(text: str) -> str:
    """Return a digest in lower case. Raises BadParameter if the text is not a digest."""
    digest = text.strip().lower()
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise typer.BadParameter(f"{text!r} is not a digest of 64 hex digits")
    return digest
