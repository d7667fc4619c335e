"""What can be done with protections, and what it costs."""

from typing import Any

from tests.support.dashboards import MODEL
from tests.tui.still import entry, uuid
from vmckpt_tui import actions
from vmckpt_tui.action_lists.all import BY_NAME
from vmckpt_tui.actions import Scene, Where


def of(one: dict[str, Any] | None) -> Scene:
    return Scene(where=Where.PROTECTION, model=MODEL, entry=one)


def test_nothing_is_done_with_no_protection() -> None:
    for name in ("failover", "switch", "test", "unprotect"):
        assert actions.why_not(BY_NAME[name], of(None)) == "no protection is selected"


def test_who_is_not_ready_can_fail_over_and_is_not_switched_to() -> None:
    late = entry()
    late["says"]["beta"] |= {"ready": False, "says": "it is 5 epochs behind"}
    for name in ("switch", "test"):
        why = actions.why_not(BY_NAME[name], of(late))
        assert why == "the standby is not ready: it is 5 epochs behind"
        assert actions.why_not(BY_NAME[name], of(entry())) is None
    assert actions.why_not(BY_NAME["failover"], of(late)) is None


def test_one_test_at_a_time_and_only_one_that_runs_is_ended() -> None:
    tried = entry()
    tried["says"]["beta"]["test"] = {"runs": True}
    assert actions.why_not(BY_NAME["test"], of(tried)) == "a failover test is running"
    assert actions.why_not(BY_NAME["end-test"], of(tried)) is None
    assert actions.why_not(BY_NAME["end-test"], of(entry())) == "no failover test is running"


def test_how_its_host_is_known_to_be_dead_is_an_option_of_the_failover() -> None:
    run = BY_NAME["failover"].run
    assert run is not None
    assert run(of(entry()), {}) == (("failover", uuid(6)),)
    assert run(of(entry()), {"dead": "--fence"}) == (("failover", uuid(6), "--fence"),)


def test_a_failover_tells_how_much_is_lost_and_a_switch_that_nothing_is() -> None:
    lost = BY_NAME["failover"].costs(of(entry()), {}) or ""
    assert lost.startswith("safe will resume on beta from its last epoch: the last 110 ms of its")
    unknown = BY_NAME["failover"].costs(of(entry(rpo_s=None)), {}) or ""
    assert "an unknown amount of its work on alpha is lost; if it ran unprotected" in unknown
    outdated = BY_NAME["failover"].costs(of(entry(phase="alone")), {}) or ""
    assert "all later work is lost, including output that clients have received" in outdated
    assert "externally visible" not in unknown + outdated
    assert "paused for longer than in an epoch (12 ms) and loses nothing" in (
        BY_NAME["switch"].costs(of(entry()), {}) or ""
    )
