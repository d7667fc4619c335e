"""What of `command` needs no host: whether and when it is tried again."""

from dataclasses import replace

import pytest

from tests.support.policies import policy
from vmckpt.migration import service
from vmckpt.migration.report import MigrationReport
from vmckpt.model.migration import FailureSide, Outcome
from vmckpt.policy.model import OnFailure, Retries
from vmckpt.units import Seconds

RETRIES = Retries(
    times=2, first_wait=Seconds(10.0), factor=2.0, longest_wait=Seconds(60.0)
)  # fmt: skip
RETRYING = replace(policy(), retries=RETRIES, on_failure=OnFailure.RETRY)


def told(outcome: Outcome) -> MigrationReport:
    return MigrationReport(
        guest="web1", source="alpha", target="beta", outcome=outcome, driver=None,
        began=Seconds(0.0), elapsed=Seconds(1.0), totals=None, observed_downtime=None,
    )  # fmt: skip


def test_waits_grow_up_to_the_longest() -> None:
    waits = [service.wait_before(RETRIES, failed) for failed in range(1, 6)]

    assert waits == pytest.approx([10, 20, 40, 60, 60])


@pytest.mark.parametrize("outcome", list(Outcome))
def test_only_what_failed_while_the_guest_went_on_is_tried_again(outcome: Outcome) -> None:
    assert service.should_retry(told(outcome), RETRYING, 1) is (outcome is Outcome.FAILED)


@pytest.mark.parametrize("side", list(FailureSide))
def test_what_libvirt_refuses_it_would_refuse_again(side: FailureSide) -> None:
    refused = replace(told(Outcome.FAILED), refused=side)

    assert not service.should_retry(refused, RETRYING, 1)


def test_as_often_as_the_policy_says_and_if_it_says_so() -> None:
    failed = told(Outcome.FAILED)

    assert [service.should_retry(failed, RETRYING, number) for number in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert not service.should_retry(failed, replace(RETRYING, on_failure=OnFailure.STOP), 1)
