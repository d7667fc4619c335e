"""What is shown of protections."""

from tests.tui.still import entry
from vmckpt_tui.screens import protection_view


def test_a_protection_tells_parts_and_readiness() -> None:
    told = dict(protection_view.rows(entry()))
    assert told["standby"].startswith("✓ ready")
    assert told["behind (RPO)"] == "110 ms, worst 400 ms"
    names = [name for name, _, _ in protection_view.parts(entry(), 20)]
    assert names == ["stop", "state", "changed pages"]
    assert len(protection_view.strip(entry(), 60)) == 60
    beat = protection_view.beat(entry())
    assert beat is not None
    assert beat.pause_s == 0.012


def test_a_silent_primary_is_no_error() -> None:
    silent = entry()
    silent["says"]["alpha"] = {"error": "alpha is silent", "unreachable": True}
    assert protection_view.beat(silent) is None
    assert protection_view.strip(silent, 60) == ""
    assert dict(protection_view.rows(silent))["problem"] == "alpha is silent"


def test_after_a_failover_it_tells_what_happened_and_what_to_do() -> None:
    over = entry()
    over["says"]["alpha"] = {"error": "alpha is silent", "unreachable": True}
    over["says"]["beta"] = {"role": "backup", "outcome": "failed-over", "why": "silent"}
    told = dict(protection_view.rows(over))

    assert told["ended"].startswith("failed over; the guest is running on beta")
    assert told["next"].startswith("run vmckpt recover")
    assert set(told) == {"guest", "phase", "ended", "next"}
