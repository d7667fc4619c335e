"""libvirtd is restarted while a snapshot is taken: whatever becomes of it, the guest runs."""

import json
import time

import pytest

from tests.lab.bench import WHOLE, Bench, finish, first_line
from tests.lab.snapshots import SMALL, ids, left, taken
from vmckpt_lab.faults import inject


def restart(bench: Bench, seconds: float) -> None:
    """alpha's libvirtd is killed, and comes back after so long."""
    inject.kill(inject.libvirtd(bench.plan, "alpha"))
    time.sleep(seconds)  # for as long as it is down
    inject.start_libvirtd(bench.plan, "alpha")


def asked(bench: Bench, command: str) -> dict[str, object]:
    told = bench.inside(
        "alpha", "virsh", "qemu-monitor-command", "web1", json.dumps({"execute": command})
    )
    found: dict[str, object] = json.loads(told)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    ("word", "seconds"),
    [
        ("capture", 1.5),
        pytest.param("capture", 20.0, marks=pytest.mark.campaign),
        pytest.param("store", 1.5, marks=pytest.mark.campaign),
        ("store", 20.0),
    ],
)
def test_the_guest_runs_and_nothing_is_left(kept: Bench, word: str, seconds: float) -> None:
    kept.guest(**{**SMALL, "memory": "512MiB", "dirty": "200MiB@5MiB/s"})
    taking = kept.start("snapshot", "create", "web1", "--json")
    first_line(taking, word)
    restart(kept, seconds)
    done = finish(taking)
    recovered = kept.good("recover", "--json").json
    assert len(ids(kept)) == (done.code == 0), done.err
    assert [one["outcome"] for one in recovered] in ([], ["failed"], ["completed"]), recovered
    if recovered:
        assert "recover" in done.err
    assert kept.good("recover", "--json").json == []
    assert asked(kept, "query-status")["return"]["status"] == "running"  # type: ignore[index]
    told = asked(kept, "query-migrate-capabilities")["return"]
    on = {one["capability"] for one in told if one["state"]}  # type: ignore[attr-defined]
    assert on == {"events"}
    assert left(kept) == []
    assert kept.ledgers() == WHOLE
    taken(kept)
    kept.good("migrate", "web1", "--to", "beta")
