"""vmckpt guests names a guest that has two copies; vmckpt prepare asks before it replaces cards."""

import asyncio
import json as json_text
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.builders import host_facts
from tests.support.card_reports import CARD, DONE, LOST, found
from tests.support.two_copies import HOSTS, INVENTORY, TWO, WEB, asked
from vmckpt.app import fleet
from vmckpt.app import hosts as app_hosts
from vmckpt.app.controller import Caller, Controller, Inventory
from vmckpt.capture.network_cards import CardReport
from vmckpt.cli import hosts as hosts_command
from vmckpt.errors import BadInput, HostUnreachable, HypervisorError, TwoCopies
from vmckpt.model.same_host import SameUuid
from vmckpt.snapshot.prepare import Readiness


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


class Prepared:
    """What is known of a guest's cards, and what was done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cards: CardReport) -> None:
        self.found, self.after = found(CARD), found(*cards)
        self.done: list[str] = []
        for name in ("guest_readiness", "make_ready"):
            monkeypatch.setattr(app_hosts, name, getattr(self, name))
        caller = Caller(emit=lambda _: None, warn=print, stop=asyncio.Event())
        known = Inventory(path=Path("hosts.yaml"), hosts={}, observer=None)
        acting = Controller(inventory=known, caller=caller)
        monkeypatch.setattr(hosts_command, "_acting", lambda *_, **__: acting)

    async def guest_readiness(self, _: Controller, guest: str, *, live: bool) -> Readiness:
        self.done.append(f"look at {guest}{' live' if live else ''}")
        return self.found if live else replace(self.found, live=None)

    async def make_ready(self, acting: Controller, guest: str, *, live: bool) -> Readiness:
        assert not acting.caller.stop.is_set()
        self.done.append(f"prepare {guest}{' live' if live else ''}")
        return self.after


def test_cards_are_replaced_when_they_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared = Prepared(monkeypatch, DONE)
    hosts_command.prepare("web1")
    assert prepared.done == ["look at web1"]
    hosts_command.prepare("web1", live=True, dry_run=True)
    assert prepared.done[1:] == ["look at web1 live"]
    assert "it would be unplugged" in capsys.readouterr().out
    with pytest.raises(BadInput, match="--yes"):  # there is no terminal to ask
        hosts_command.prepare("web1", live=True)
    hosts_command.prepare("web1", live=True, yes=True)
    assert prepared.done[3:] == ["look at web1 live", "prepare web1 live"]
    assert "without network for 750 ms" in " ".join(capsys.readouterr().out.split())


def test_the_question_names_both_changes() -> None:
    one = replace(found(CARD), lacks=True)
    assert hosts_command._question(one) == (
        "change the stored definition and replace network cards (about 1 s without network each) of"
        " web1 on alpha?"
    )
    assert "network cards" not in hosts_command._question(replace(one, live=None))
    assert "definition" not in hosts_command._question(found(CARD))


def test_an_address_that_does_not_return_fails_the_command_after_its_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Prepared(monkeypatch, LOST)
    with pytest.raises(HypervisorError, match=r"does not report 10\.0\.0\.5"):
        hosts_command.prepare("web1", live=True, yes=True, json=True)
    assert json_text.loads(capsys.readouterr().out)["cards"][0]["confirmed"] is False
