"""The table of docs/recovery.md, made from what `recovery.decide.decide` decides.

`python -m tests.support.recovery_table` writes it into the document.
"""

from collections.abc import Sequence

from tests.support.paths import ROOT
from vmckpt.migration.recovery.decide import ODD, HostView, RecoveryDecision, decide
from vmckpt.model.guest import GuestState, Presence

DOCUMENT = ROOT / "docs/recovery.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

PRESENCES = {
    HostView.SILENT: Presence(reachable=False),
    HostView.NONE: Presence(reachable=True),
    HostView.RUNS: Presence(reachable=True, state=GuestState.RUNNING),
    HostView.MOVING: Presence(reachable=True, state=GuestState.RUNNING, migrating=True),
    HostView.HELD: Presence(reachable=True, state=GuestState.PAUSED, held=True),
    HostView.PAUSED: Presence(reachable=True, state=GuestState.PAUSED),
    HostView.IN_TWO: Presence(reachable=True, state=GuestState.PAUSED, post_copy=True),
}


def decided(
    here: HostView,
    there: HostView,
    *,
    ordered: bool = True,
    paused: bool = False,
    elsewhere: Sequence[str] = (),
    may_have_run: bool = False,
    sent_all: bool = True,
) -> RecoveryDecision:
    source, target = PRESENCES[here], PRESENCES[there]
    return decide(
        source,
        target,
        ordered=ordered,
        paused_by_us=paused,
        elsewhere=elsewhere,
        may_have_run=may_have_run,
        sent_all=sent_all,
    )


def table() -> str:
    """All pairs of answers, those with the same verdict in one row."""
    rows: dict[tuple[str, RecoveryDecision], list[HostView]] = {}
    for here in HostView:
        for there in HostView:
            verdict = decided(here, there)
            if HostView.SILENT not in (here, there) and verdict is not ODD:
                rows.setdefault((here, verdict), []).append(there)
    lines = [
        "| source | target | what is true | what is done | ended as |",
        "|---|---|---|---|---|",
    ]
    for (source, verdict), theres in rows.items():
        every = len(theres) == len(HostView) - 1
        lines.append(_row(source, "anything" if every else ", ".join(theres), verdict))
    older = decided(HostView.HELD, HostView.NONE, may_have_run=True)
    lines.append(_row(HostView.HELD, "no process, and it may have run there", older))
    both = decided(HostView.SILENT, HostView.SILENT)
    lines.append(_row(HostView.SILENT, HostView.SILENT, both))
    silent = decided(HostView.SILENT, HostView.RUNS)
    lines.append(_row(HostView.SILENT, "anything else", silent))
    lines.append(
        _row("paused by the migration", HostView.SILENT, decided(HostView.HELD, HostView.SILENT))
    )
    never = decided(HostView.RUNS, HostView.SILENT, sent_all=False)
    lines.append(_row("runs, and never sent all of it", HostView.SILENT, never))
    lines.append(_row("anything else", HostView.SILENT, decided(HostView.RUNS, HostView.SILENT)))
    lines.append(_row("any other two answers", "", ODD))
    return "\n".join(lines) + "\n"


def _row(here: str, there: str, verdict: RecoveryDecision) -> str:
    done = "; ".join(verdict.acts) or f"nothing is touched; {verdict.settle}"
    if verdict.outcome is not None and not verdict.acts:
        done = "nothing is left to do"
    return f"| {here} | {there} | {verdict.truth} | {done} | {verdict.outcome or '–'} |"


def main() -> None:
    """Write the table into the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
