"""vmckpt guests names a guest that has two copies."""

import pytest

from tests.support.builders import host_facts
from tests.support.two_copies import HOSTS, INVENTORY, TWO, WEB, asked
from vmckpt.app import fleet
from vmckpt.cli import hosts as hosts_command
from vmckpt.errors import HostUnreachable, TwoCopies
from vmckpt.model.same_host import SameUuid


@pytest.mark.parametrize("json", [False, True])
def test_the_list_of_guests_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], json: bool
) -> None:
    asked(monkeypatch, TWO, TWO)
    with pytest.raises(TwoCopies, match=r"web1 is running on alpha and beta; run vmckpt recover"):
        hosts_command.guests(json=json)
    assert "web1" in capsys.readouterr().out


ALPHA, BETA = HOSTS.values()
ONE_HOST = SameUuid(first="alpha", second="beta", one=True)
NO_ROUTE = {f"h{number:03}": f"h{number:03}: no route to host" for number in range(200)}


def listed(monkeypatch: pytest.MonkeyPatch, listing: fleet.Listing) -> None:
    async def everything(*_: object) -> fleet.Listing:
        return listing

    monkeypatch.setattr(fleet, "listing", everything)
    monkeypatch.setattr("vmckpt.app.controller.load_inventory", lambda _: INVENTORY)


def test_a_host_with_two_names_is_a_warning_and_its_guests_are_listed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed(monkeypatch, fleet.Listing(found=[(ALPHA, WEB)], errors={}, same=(ONE_HOST,)))
    hosts_command.guests()
    told = capsys.readouterr()
    assert told.out.count("web1") == 1
    assert told.err == (
        "warning: alpha and beta are one host; leave alpha or beta out of hosts.yaml\n"
    )


async def seen(*_: object) -> tuple[list[fleet.HostView], tuple[SameUuid, ...]]:
    views = [fleet.HostView(host=one, facts=host_facts("u"), error=None) for one in HOSTS.values()]
    return views, (ONE_HOST,)


def test_the_list_of_hosts_says_that_two_names_are_one_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fleet, "hosts", seen)
    monkeypatch.setattr("vmckpt.app.controller.load_inventory", lambda _: INVENTORY)
    hosts_command.hosts()
    assert "warning: alpha and beta are one host" in capsys.readouterr().err


def test_200_hosts_that_do_not_answer_are_one_short_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was one line of 4 kB."""
    listed(monkeypatch, fleet.Listing(found=[], errors=NO_ROUTE))
    with pytest.raises(HostUnreachable) as caught:
        hosts_command.guests()
    assert str(caught.value) == (
        "200 hosts do not answer: h000, h001, h002 and 197 more; h000: no route to host;"
        " run vmckpt doctor h000 h001 h002"
    )
    few = {name: NO_ROUTE[name] for name in ("h001", "h002")}
    with pytest.raises(HostUnreachable, match=r"^h001: no route to host; h002: no route to host;"):
        hosts_command._complain(few)
    capsys.readouterr()
