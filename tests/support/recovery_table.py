"""The table of docs/recovery.md, made from what `aftermath.judge` decides.

`python -m tests.unit.recovery_table` writes it into the document.
"""

from collections.abc import Sequence

from tests.support.paths import ROOT
from vmckpt.migration.recovery.decide import ODD, Seen, Verdict, judge
from vmckpt.model.guest import GuestState, Presence

DOCUMENT = ROOT / "docs/recovery.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"

PRESENCES = {
    Seen.SILENT: Presence(reachable=False),
    Seen.NONE: Presence(reachable=True),
    Seen.RUNS: Presence(reachable=True, state=GuestState.RUNNING),
    Seen.MOVING: Presence(reachable=True, state=GuestState.RUNNING, migrating=True),
    Seen.HELD: Presence(reachable=True, state=GuestState.PAUSED, held=True),
    Seen.PAUSED: Presence(reachable=True, state=GuestState.PAUSED),
    Seen.IN_TWO: Presence(reachable=True, state=GuestState.PAUSED, post_copy=True),
}


def decided(
    here: Seen,
    there: Seen,
    *,
    ordered: bool = True,
    paused: bool = False,
    elsewhere: Sequence[str] = (),
    may_have_run: bool = False,
    sent_all: bool = True,
) -> Verdict:
    source, target = PRESENCES[here], PRESENCES[there]
    return judge(
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
    rows: dict[tuple[str, Verdict], list[Seen]] = {}
    for here in Seen:
        for there in Seen:
            verdict = decided(here, there)
            if Seen.SILENT not in (here, there) and verdict is not ODD:
                rows.setdefault((here, verdict), []).append(there)
    lines = [
        "| source | target | what is true | what is done | ended as |",
        "|---|---|---|---|---|",
    ]
    for (source, verdict), theres in rows.items():
        every = len(theres) == len(Seen) - 1
        lines.append(_row(source, "anything" if every else ", ".join(theres), verdict))
    older = decided(Seen.HELD, Seen.NONE, may_have_run=True)
    lines.append(_row(Seen.HELD, "no process, and it may have run there", older))
    silent = decided(Seen.SILENT, Seen.RUNS)
    lines.append(_row(Seen.SILENT, "anything", silent))
    lines.append(_row("stands for the migration", Seen.SILENT, decided(Seen.HELD, Seen.SILENT)))
    never = decided(Seen.RUNS, Seen.SILENT, sent_all=False)
    lines.append(_row("runs, and never sent all of it", Seen.SILENT, never))
    lines.append(_row("anything else", Seen.SILENT, decided(Seen.RUNS, Seen.SILENT)))
    lines.append(_row("any other two answers", "", ODD))
    return "\n".join(lines) + "\n"


def _row(here: str, there: str, verdict: Verdict) -> str:
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
