"""What Prometheus is told, and what somebody is paged for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from tests.support.metrics import NOW_STANDING, REPORT, ended, happened, key, scraped
from tests.tui import still
from tests.tui.still import DRAIN, FLEET, MOVE, NOW, entry
from vmckpt.journal.follow import Happening
from vmckpt.monitor import alerts
from vmckpt.monitor.alerts import Lasting, Page, State
from vmckpt.monitor.health import HealthSnapshot, Trouble, troubles
from vmckpt.monitor.prometheus import Exporter
from vmckpt.units import Seconds


def test_how_everything_stands_is_told_in_seconds_bytes_and_ratios() -> None:
    exporter = Exporter()
    exporter.now = NOW_STANDING
    told = scraped(exporter)

    busy = {"job": "m-7k3f", "guest": "busy", "source": "beta", "target": "gamma"}
    safe = {"guest": "safe", "primary": "alpha", "backup": "beta"}
    assert {
        key("last_look_timestamp_seconds", what="hosts"): NOW,
        key("host_up", host="alpha"): 1, key("host_up", host="omega"): 0,
        key("host_maintenance", host="delta"): 1, key("host_maintenance", host="alpha"): 0,
        key("host_memory_bytes", host="alpha"): 64 << 30,
        key("host_guests", host="alpha", state="running"): 3,
        key("jobs", kind="migrate", state="running"): 1,
        key("migration_dirty_bytes_per_second", **busy): 50 << 20,
        key("migration_iteration", **busy): 3, key("migration_throttle_ratio", **busy): 0,
        key("evacuation_guests", job="e-4b7x", kind="evacuate", host="alpha", state="moving"): 1,
        key("evacuation_guests", job="e-4b7x", kind="evacuate", host="alpha", state="waiting"): 1,
        key("protection_ready", **safe): 1, key("protection_behind_seconds", **safe): 0.11,
        key("protection_pause_seconds", **safe): 0.012,
        key("store_up", store="main"): 1, key("store_up", store="far"): 0,
        key("snapshots", store="main"): 4, key("snapshots_damaged", store="main"): 1,
        key("snapshot_newest_timestamp_seconds", guest="web1", store="main"): NOW - 900,
        key("snapshot_verified_timestamp_seconds", guest="web1", store="main"): NOW - 10_800,
    }.items() <= told.items()  # fmt: skip
    # Nobody can say how much memory a silent host has, or when the damaged one was found good.
    assert key("host_memory_bytes", host="omega") not in told
    assert key("snapshot_verified_timestamp_seconds", guest="web2", store="main") not in told


def test_what_was_never_looked_at_is_not_told() -> None:
    names = {name for name, _ in scraped(Exporter())}
    assert names & {"vmckpt_host_up", "vmckpt_jobs", "vmckpt_protection_ready"} == set()


def test_what_ends_is_counted_with_its_downtime_and_its_forecast() -> None:
    exporter = Exporter()
    exporter.take(ended("completed", report=REPORT, began_at=NOW - 30))
    exporter.take(ended("failed", report={"bytes_transferred": 1000}))
    exporter.take(ended("completed", kind="snapshot"))
    exporter.take(happened("decided", {"action": "throttle", "rule": "grow"}))
    exporter.take(happened("decided", {"action": "moved", "rule": "evacuate"}, kind="evacuate"))
    exporter.take(happened("phase-changed", {"phase": "pre-copy"}))
    exporter.told("took")
    told = scraped(exporter)

    assert {
        key("operations_total", kind="migrate", outcome="completed"): 1,
        key("operations_total", kind="migrate", outcome="failed"): 1,
        key("operations_total", kind="snapshot", outcome="completed"): 1,
        key("operation_duration_seconds_sum", kind="migrate"): 30,
        key("migration_downtime_seconds_sum", seen_by="qemu"): 0.12,
        key("migration_downtime_seconds_count", seen_by="qemu"): 1,
        key("migration_iterations_sum"): 7,
        key("migration_transferred_bytes_total"): 6000,
        key("decisions_total", action="throttle", rule="grow"): 1,
        key("forecasts_total", of="total", covered="false"): 1,
        key("forecasts_total", of="downtime", covered="true"): 1,
        key("forecast_ratio_sum", of="total"): 2.0,
        key("service_events_total", event="took"): 1,
    }.items() <= told.items()
    assert [name for name, labels in told if ("action", "moved") in labels] == []


def test_what_somebody_has_to_look_at() -> None:
    lost = replace(MOVE, attended=False)
    gone = entry(phase="alone")
    found = troubles(replace(NOW_STANDING, jobs=(lost, DRAIN), protections={"p-9abc": gone}))

    assert set(found) == {
        "host omega", "job m-7k3f", "protection p-9abc", "snapshot main s-ccc", "store far",
    }  # fmt: skip
    assert found["job m-7k3f"].hint == "run vmckpt recover"
    assert "does not answer: omega: no answer" in found["host omega"].text
    assert troubles(HealthSnapshot()) == {}


def test_a_guest_that_failed_over_is_told_of_with_the_next_step() -> None:
    over = entry()
    over["says"]["beta"] = {"role": "backup", "outcome": "failed-over", "why": "silent"}
    found = troubles(HealthSnapshot(protections={"p-9abc": over}))["protection p-9abc"]

    assert found.text.startswith(
        "safe is no longer protected: failed over; the guest is running on beta"
    )
    assert found.hint.startswith("run vmckpt recover")


def test_a_guest_that_waits_for_its_memory_is_told_of_while_it_is_tried_again() -> None:
    broken = replace(MOVE, operation=replace(MOVE.operation, phase="postcopy-paused"))
    found = troubles(HealthSnapshot(jobs=(broken,)))
    assert "busy is paused" in found["stream m-7k3f"].text
    assert troubles(HealthSnapshot(jobs=(MOVE,))) == {}


def test_what_never_happened_is_counted_as_nothing() -> None:
    """A series that begins at 1 has never grown: an alert on it would miss the first one."""
    told = scraped(Exporter())
    for outcome in ("lost", "unknown", "postcopy-paused", "failed"):
        assert told[key("operations_total", kind="migrate", outcome=outcome)] == 0
    assert told[key("forecasts_total", of="total", covered="false")] == 0


def test_a_host_in_maintenance_may_be_silent() -> None:
    fleet = replace(FLEET, hosts=tuple(replace(one, closed="m-1") for one in FLEET.hosts))
    assert "host omega" not in troubles(HealthSnapshot(fleet=fleet))


def pages(story: Sequence[tuple[float, set[str]]]) -> list[tuple[float, str, str]]:
    """What is sent, when looks find these troubles."""
    known: Mapping[str, Lasting] = {}
    sent: list[Page] = []
    for at, names in story:
        found = {name: Trouble(text=name, hint="look") for name in names}
        # The clock on the wall was put back an hour.
        known, now = alerts.watch(known, found, Seconds(at), at - 3600)
        sent += now
    return [(one.at + 3600, one.key, str(one.state)) for one in sent]


@pytest.mark.parametrize(
    ("story", "expected"),
    [
        pytest.param([(0, {"a"}), (10, {"a"}), (20, set()), (40, set())], [], id="it-passes"),
        pytest.param(
            [(0, {"a"}), (31, {"a"}), (60, {"a"}), (90, set()), (100, set())],
            [(31, "a", "firing"), (90, "a", "resolved")],
            id="once-and-once-more-when-it-is-over",
        ),
        pytest.param(
            [(0, {"a"}), (20, set()), (25, {"a"}), (50, {"a"}), (55, {"a"})],
            [(55, "a", "firing")],
            id="its-time-begins-anew",
        ),
        pytest.param(
            [(0, {"a"}), (20, {"a", "b"}), (31, {"a", "b"}), (51, {"b"})],
            [(31, "a", "firing"), (51, "b", "firing"), (51, "a", "resolved")],
            id="each-by-itself",
        ),
    ],
)
def test_what_lasts_is_told_once(
    story: Sequence[tuple[float, set[str]]], expected: list[tuple[float, str, str]]
) -> None:
    assert pages(story) == expected


@pytest.mark.parametrize(
    ("one", "text", "hint"),
    [
        pytest.param(ended("completed"), None, None, id="well"),
        pytest.param(ended("cancelled"), None, None, id="somebody-wanted-it"),
        pytest.param(happened("decided", {"action": "x"}), None, None, id="no-end"),
        pytest.param(
            ended("failed", report={"error": "no room"}),
            "migrate of busy ended: failed: no room", "run vmckpt job m-1", id="failed",
        ),
        pytest.param(ended("lost"), "migrate of busy ended: lost", "run vmckpt recover", id="lost"),
        pytest.param(
            ended("failed", detail={"part_of": "e-1"}), None, None, id="a-part-is-tried-again"
        ),
        pytest.param(
            ended("unknown", detail={"part_of": "e-1"}), "migrate of busy ended: unknown",
            "run vmckpt recover", id="a-part-of-which-nobody-knows",
        ),
        pytest.param(
            ended("completed", kind="protect",
                  report={"failed_over": "gamma", "why": "alpha is silent"}),
            "busy has failed over to gamma: alpha is silent",
            "once beta is up again, run vmckpt protect busy --reverse", id="failover",
        ),
        pytest.param(
            ended("completed", kind="protect", report={"failed_over": "gamma"}),
            "busy has failed over to gamma",
            "once beta is up again, run vmckpt protect busy --reverse", id="found-by-recover",
        ),
    ],
)  # fmt: skip
def test_what_an_end_is_worth(one: Happening, text: str | None, hint: str | None) -> None:
    page = alerts.of_happening(one)
    assert (None, None) if page is None else (page.trouble.text, page.trouble.hint) == (text, hint)
    assert (page is None) == (text is None)


def test_a_page_keeps_its_id_when_it_is_sent_again() -> None:
    page = alerts.of_happening(ended("lost"))
    assert page is not None
    told = page.as_json()
    assert told == page.as_json()
    assert told["id"] != replace(page, state=State.RESOLVED).as_json()["id"]
    assert (told["version"], told["state"], told["job"]) == (1, "once", "m-1")


def test_the_fields_of_a_page_are_those_of_the_docs() -> None:
    page = Page(key="k", state=State.FIRING, at=NOW, trouble=Trouble(text="t", hint="m"))
    assert set(page.as_json()) == {
        "version", "id", "at", "state", "key", "text", "hint", "mend", "job", "guest", "host",
    }  # fmt: skip
    assert still.NOW == NOW
