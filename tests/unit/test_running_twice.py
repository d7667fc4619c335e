"""A guest that runs on two hosts is never passed over in silence."""

from dataclasses import replace

import pytest

from tests.unit.builders import GUEST
from vmckpt.api import fleet
from vmckpt.cli import hosts as command
from vmckpt.errors import TwoCopies
from vmckpt.model.guests import Guest, GuestState, running_twice
from vmckpt.model.hosts import Host

WEB = replace(GUEST, name="web1", uuid="u-1", state=GuestState.RUNNING)


@pytest.mark.parametrize(
    ("there", "twice"),
    [
        (WEB, True),
        (replace(WEB, state=GuestState.BLOCKED), True),
        (replace(WEB, name="other name"), True),
        (replace(WEB, state=GuestState.PAUSED), False),
        (replace(WEB, state=GuestState.STANDBY), False),
        (replace(WEB, state=GuestState.TEST), False),
        (replace(WEB, state=GuestState.SHUT_OFF), False),
        (replace(WEB, uuid="u-2"), False),
    ],
)
def test_only_cpus_that_run_count(there: Guest, twice: bool) -> None:
    found = running_twice([("alpha", WEB), ("gamma", replace(WEB, uuid="u-3")), ("beta", there)])
    assert found == ([(there.name, ["alpha", "beta"])] if twice else [])


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_guests_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    async def guests(_: object) -> object:
        there = [(Host(name=name, uri=f"qemu+tcp://{name}/system"), WEB) for name in ("a", "b")]
        return there, {}

    monkeypatch.setattr(fleet, "guests", guests)
    monkeypatch.setattr("vmckpt.api.load_inventory", lambda _: None)
    with pytest.raises(TwoCopies, match=r"web1 runs on a and b; run vmckpt recover"):
        command.guests(json=json)
    assert "web1" in capsys.readouterr().out
