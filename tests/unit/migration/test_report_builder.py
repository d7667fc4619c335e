"""The report of a plan, and of what became of it."""

from dataclasses import replace

import pytest

from tests.support.builders import FACTS, HOST, sample
from tests.support.policies import policy
from vmckpt.migration import report_builder
from vmckpt.migration.plan.planner import NO_COPIES, Plan
from vmckpt.migration.plan.storage_cleanup import Tidied
from vmckpt.migration.report import MigrationReport
from vmckpt.migration.request import Setting
from vmckpt.migration.run.engine import Ending
from vmckpt.model.disk import CopyPlan, DiskCopy
from vmckpt.model.finding import Finding, Severity
from vmckpt.model.migration import Driver, JobTotals, Mode, Outcome
from vmckpt.units import MIB, Bytes, Seconds

SETTING = Setting(source=HOST, target=replace(HOST, name="beta"), policies=(), outside=None)
SLOW = Finding(code="slow", severity=Severity.WARNING, where="web1", text="the link is slow")
FULL = Finding(code="full", severity=Severity.BLOCKER, where="beta", text="there is no room")
COPIES = CopyPlan(
    copies=tuple(
        DiskCopy(
            name=name, source=f"/srv/{name}", path=f"/pool/{name}", format="raw", size=Bytes(MIB),
            needed=Bytes(MIB), allocated=Bytes(MIB), full=False, options="", mode="600",
        )
        for name in ("vda", "vdb")
    )
)  # fmt: skip
ENDING = Ending(
    outcome=Outcome.COMPLETED, driver=Driver.PEER_TO_PEER, began=Seconds(9.0),
    elapsed=Seconds(4.0), totals=None, samples=(sample(10.0),), decisions=(),
    warnings=("it was close",), error=None, switched=Seconds(11.0),
)  # fmt: skip


def plan(*findings: Finding, copies: CopyPlan = NO_COPIES) -> Plan:
    return Plan(facts=FACTS, findings=findings, policy=policy(), mode=Mode.HYBRID, copies=copies)


def carried_out(ending: Ending, tidied: Tidied) -> MigrationReport:
    made = plan(SLOW, copies=COPIES)
    begun = report_builder.not_begun(made, SETTING, "web1")
    return report_builder.carried_out(begun, made, ending, Seconds(0.1), tidied)


@pytest.mark.parametrize(
    ("findings", "outcome"), [((SLOW,), Outcome.PLANNED), ((SLOW, FULL), Outcome.BLOCKED)]
)
def test_what_was_not_begun_is_planned_or_blocked(
    findings: tuple[Finding, ...], outcome: Outcome
) -> None:
    told = report_builder.not_begun(plan(*findings), SETTING, "web1")

    assert told.outcome is outcome
    assert (told.source, told.target, told.mode) == ("alpha", "beta", Mode.HYBRID)
    assert told.findings == findings
    assert told.warnings == ("web1: the link is slow",)


def test_of_a_guest_that_no_host_knows_no_policy_is_told() -> None:
    unknown = Plan(facts=replace(FACTS, guest=None), findings=())
    told = report_builder.not_begun(unknown, SETTING, "0d6f")

    assert (told.guest, told.outcome) == ("0d6f", Outcome.BLOCKED)
    assert (told.policy, told.mode) == (None, None)


def test_of_what_was_carried_out_all_is_told_that_was_seen() -> None:
    told = carried_out(ENDING, Tidied(removed=("/srv/vda",), stays=("/srv/vdb: it is in use",)))

    assert (told.outcome, told.elapsed, told.switched) == (Outcome.COMPLETED, 4.0, 11.0)
    assert told.observed_downtime == pytest.approx(0.1)
    assert told.samples == ENDING.samples
    assert told.warnings == ("web1: the link is slow", "it was close", "/srv/vdb: it is in use")
    assert (told.removed, told.left_behind) == (("/srv/vda",), ("/srv/vdb",))


def test_a_guest_that_stayed_has_left_nothing_behind() -> None:
    failed = replace(ENDING, outcome=Outcome.FAILED, error="no room")
    told = carried_out(failed, Tidied(troubles=("/pool/vda on beta is still there",)))

    assert (told.error, told.left_behind) == ("no room", ())
    assert told.warnings[-1] == "/pool/vda on beta is still there"


def test_copied_disks_count_as_sent_although_libvirts_statistics_lack_them() -> None:
    totals = JobTotals(
        total=Seconds(3.0), setup=None, downtime=None, iterations=1, transferred=Bytes(5 * MIB)
    )
    told = carried_out(replace(ENDING, totals=totals, switchover=Seconds(0.2)), Tidied())

    assert told.transferred == 7 * MIB
    assert told.downtime == 0.2
