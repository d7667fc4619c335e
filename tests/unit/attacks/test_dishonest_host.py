"""What the agent of a host that lies can do to the controller."""

import asyncio
import copy
import json
import math
import sys
import time
from collections.abc import Mapping
from typing import Any, Self
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmckpt.agent import client
from vmckpt.agent.protocol import error_from_json
from vmckpt.errors import RemoteError, VmckptError
from vmckpt.model.events import Event
from vmckpt.model.host import Host
from vmckpt.protection import agent_answers, gather, status
from vmckpt.protection import agent_client as protection_agent_client
from vmckpt.protection.agent_status import parse_answer
from vmckpt.protection.host_death import Case, decide
from vmckpt.remote import agent_channel
from vmckpt.remote.agent_channel import AgentProcess
from vmckpt.replication.backup.standby_setup import Image
from vmckpt.units import Seconds

HERE = Host(name="liar", uri="qemu:///system")


class Liar:
    """An agent that tells these things, and remembers what it was answered."""

    said: list[Any]
    heard: list[Mapping[str, Any]]

    def __init__(self, host: Host, args: object, remote: object = None) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def send(self, message: Mapping[str, Any]) -> None:
        self.heard.append(message)

    async def receive(self) -> dict[str, Any]:
        if not self.said:
            raise RemoteError("it ended")
        return dict(self.said.pop(0))


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> type[Liar]:
    def known(_: Host) -> tuple[str, ...]:
        return ("vmckpt-agent",)

    monkeypatch.setattr(client, "AgentProcess", Liar)
    monkeypatch.setattr(client, "_words", known)
    monkeypatch.setattr(Liar, "said", [], raising=False)
    monkeypatch.setattr(Liar, "heard", [], raising=False)
    return Liar


async def carried_out(emitted: list[Event]) -> dict[str, Any]:
    return await client.run_order(HERE, {"do": "x"}, emitted.append, asyncio.Event())


NONSENSE = [
    {"done": None}, {"done": 7}, {"done": "yes"}, {"done": [1]}, {"done": ["ab"]},
    {"error": None}, {"error": "no"}, {"error": [{}]}, {"ask": "sign", "about": "me"},
    {"ask": "sign", "about": [1]}, {"progress": None}, {"progress": "half"}, {"progress": []},
    {"progress": {"done": "many"}}, {"progress": {"done": -1}}, {"progress": {"total": 1e400}},
    {"progress": {"done": math.nan}}, {"progress": {"done": 1 << 70}}, {"progress": {"new": {}}},
]  # fmt: skip


@pytest.mark.parametrize("told", NONSENSE, ids=range(len(NONSENSE)))
async def test_nonsense_of_an_agent_is_one_line_that_names_its_host(
    liar: type[Liar], told: dict[str, Any]
) -> None:
    liar.said[:] = [told, {"done": {}}]
    with pytest.raises(RemoteError, match=r"^liar: invalid message from vmckpt-agent") as caught:
        await carried_out([])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


async def test_an_answer_that_is_nested_without_end_is_one_line(liar: type[Liar]) -> None:
    told: dict[str, Any] = {}
    for number in range(900):  # as deep as JSON is read
        told = {"median": told} if number % 2 else {"recent": [told]}
    liar.said[:] = [{"done": told}]
    with pytest.raises(
        RemoteError, match=r"^liar: invalid message from vmckpt-agent: .*nested too deeply"
    ):
        await protection_agent_client.order(HERE, "g", "ask")


async def test_what_was_not_ordered_is_refused_and_changes_nothing(liar: type[Liar]) -> None:
    asked: list[dict[str, Any]] = [
        {"ask": word, "about": {}} for word in ("sign", "intend", "make way", "\x1b[2J")
    ]
    liar.said[:] = [*asked, {"done": {}}]
    assert await carried_out([]) == {}
    assert liar.heard[1:] == [{"refused": "this order does not permit requests"}] * len(asked)


@given(
    st.dictionaries(
        st.sampled_from(["kind", "message", "mend", "undone"]),
        st.none() | st.integers() | st.text() | st.lists(st.text()) | st.dictionaries(
            st.text(), st.text()
        ),
    )
)  # fmt: skip
def test_any_error_of_an_agent_is_one_of_ours(told: dict[str, Any]) -> None:
    assert isinstance(error_from_json(told, "liar"), VmckptError)


def test_a_long_error_is_cut() -> None:
    told = {"kind": "GuestBusy", "message": "m" * 1_000_000, "mend": "n" * 1_000_000}
    assert len(str(error_from_json(told, "liar"))) < 5000


_FLOOD = """
import sys
line = '{"progress": {"done": 1, "x": "' + "x" * 1_000_000 + '"}}\\n'
try:
    while True:
        sys.stdout.write(line)
except BrokenPipeError:
    pass
"""


def filled(flood: AgentProcess) -> None:
    give_up = time.monotonic() + 60.0
    while flood._unheard < agent_channel._LONGEST and time.monotonic() < give_up:
        time.sleep(0.05)


async def test_an_agent_that_says_more_than_is_heard_takes_little_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("_ENDS_WITHIN", "_GIVES_UP_WITHIN"):
        monkeypatch.setattr(agent_channel, name, Seconds(0.2))
    async with AgentProcess(HERE, [sys.executable, "-c", _FLOOD]) as flood:
        await asyncio.to_thread(filled, flood)
        await asyncio.sleep(0.5)  # in which it says as much again, if it may
        assert agent_channel._LONGEST <= flood._unheard < agent_channel._LONGEST + 2_000_000
        for _ in range(40):  # all of it can be heard all the same
            assert (await flood.receive())["progress"]["done"] == 1


async def test_a_line_without_an_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_ENDS_WITHIN", "_GIVES_UP_WITHIN"):
        monkeypatch.setattr(agent_channel, name, Seconds(0.2))
    endless = "import sys\nwhile True: sys.stdout.write('[' * 65536)"
    async with AgentProcess(HERE, [sys.executable, "-c", endless]) as liar:
        with pytest.raises(RemoteError, match="invalid message from") as caught:
            await asyncio.wait_for(liar.receive(), 30.0)
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["pause_s", "ready", "x"]), inner, max_size=3
    ),
    max_leaves=6,
)  # fmt: skip
KEYS = st.sampled_from([
    "role", "phase", "outcome", "why", "says", "error", "runs", "ready", "connected", "silent_s",
    "epoch", "rpo_s", "interval_s", "interval_why", "output_delay_s", "packets_lost", "median",
    "standby", "test", "wants_leave", "alone", "silent", "recent", "enforced_by",
])  # fmt: skip
ANSWERS = st.dictionaries(KEYS, JSON, max_size=8)


@given(ANSWERS, ANSWERS, st.tuples(*[st.booleans()] * 6))
def test_any_answer_of_a_protections_agents_is_refused_or_can_be_judged(
    ours: dict[str, Any], theirs: dict[str, Any], flags: tuple[bool, ...]
) -> None:
    try:
        agent_answers.require_answers("ask", ours)
        agent_answers.require_answers("ask", theirs)
    except ValueError:
        return
    entry = {
        "guest": "web1", "primary": "alpha", "backup": "beta",
        "says": {"alpha": ours, "beta": theirs},
        "judge": None, "automatic": True,
    }  # fmt: skip
    json.dumps(status.parse_status(entry).as_json())
    has_lease, has_fence, word, fence, watched, alone = flags
    case = Case(
        guest="web1", primary="alpha", backup="beta", ours=parse_answer(ours),
        theirs=parse_answer(theirs), word=word, has_lease=has_lease,
        has_fence=has_fence, fence=fence, watched=watched, alone=alone,
    )  # fmt: skip
    try:
        decide(case)
    except VmckptError:
        pass


@pytest.mark.parametrize(
    "told",
    [
        {"silent_s": "long"}, {"epoch": True}, {"rpo_s": math.inf}, {"why": ["a"]},
        {"says": "x" * 100_000}, {"median": {"pause_s": "1"}}, {"recent": [1]}, {"given": 7},
        {"standby": {"role": 1}}, {"packets_lost": 10**30},
    ],
)  # fmt: skip
async def test_an_answer_of_another_kind_is_as_no_answer(
    liar: type[Liar], told: dict[str, Any]
) -> None:
    liar.said[:] = [{"done": told}]
    found = await protection_agent_client.status(HERE, "u")
    assert "invalid message from vmckpt-agent" in str(found.error)
    liar.said[:] = [{"done": {"role": "primary", "epoch": 7, "rpo_s": 0.5, "median": None}}]
    assert (await protection_agent_client.status(HERE, "u")).told["epoch"] == 7


_LOOK: dict[str, Any] = {
    "name": "web1", "undo": "{}", "cards": ["net0"], "memory": [1 << 27], "xml": "<domain/>",
    "devices": {"names": ["net0"], "digest": "d"},
    "room": 1 << 30, "disk_logs": True, "definition": "", "autostart": False, "qemu": "7.2.22",
    "private": None, "epoch_cost": {"finder": "compare", "why": "", "scan": None, "written": 0},
    "disks": [{
        "name": "vda", "kind": "file", "device": "disk", "format": "raw", "source": "/a.raw",
        "read_only": False, "shareable": False, "size": 1 << 24, "node": None,
    }],
}  # fmt: skip
_ROOM: dict[str, Any] = {"memory": 1, "images": 0, "images_device": "25", "missing": []}
_BEFORE: dict[str, Any] = {
    "runs": False,
    "images": {"vda": {
        "path": "/a.raw", "there": True, "regular": True, "size": 7, "says": "", "user": "",
    }},
}  # fmt: skip
_IDENTITY: dict[str, Any] = {"certificate": "-----BEGIN", "owner": [64055, 994]}
_GOOD = {
    "look": _LOOK, "room": _ROOM, "before": _BEFORE, "identity": _IDENTITY, "stand": {"port": 1},
    "end": {"did": ["removed a file"]},
}  # fmt: skip


@pytest.mark.parametrize("order", _GOOD)
def test_what_an_agent_of_ours_answers_is_taken(order: str) -> None:
    agent_answers.require_answers(order, _GOOD[order])


def _places(told: Any) -> list[tuple[Any, Any]]:
    """Each value in it, as what it is in and where."""
    within = list(told.items() if isinstance(told, dict) else enumerate(told))
    below = [at for _, one in within if isinstance(one, dict | list) for at in _places(one)]
    return [(told, key) for key, _ in within] + below


@given(st.sampled_from(list(_GOOD)), st.integers(0), JSON | st.just(10**30), st.booleans())
def test_an_answer_with_one_lie_is_refused_or_can_be_read(
    order: str, number: int, lie: Any, missing: bool
) -> None:
    told = copy.deepcopy(_GOOD[order])
    places = _places(told)
    within, key = places[number % len(places)]
    if missing:
        del within[key]
    else:
        within[key] = lie
    try:
        agent_answers.require_answers(order, told)
    except ValueError:
        return
    _read(order, told)


def _read(order: str, told: dict[str, Any]) -> None:
    """As the controller does."""
    match order:
        case "look":
            ET.fromstring(told["xml"])
            " ".join([told["name"], told["undo"], told["qemu"], *told["cards"]])
            assert min([0, told["room"], *told["memory"]]) == 0
            for disk in gather.replicated(told):
                assert int(disk["size"] or 0) >= 0
                " ".join([disk["name"], disk["format"], disk["source"], disk["node"] or ""])
        case "room":
            " ".join([told["images_device"], *told["missing"]])
            assert min(0, told["memory"], told["images"]) == 0
        case "before":
            for image in told["images"].values():
                assert Image(**image).says + Image(**image).user is not None
        case "identity":
            assert min(0, *told["owner"]) == 0
        case "stand":
            assert int(told["port"]) >= 0
        case _:
            " ".join(told["did"])


@pytest.mark.parametrize(
    ("order", "field", "lie"),
    [
        ("look", "xml", "<domain>"), ("look", "xml", "<!DOCTYPE a><domain/>"),
        ("look", "xml", "<a/>"),
        ("look", "memory", [-1]), ("look", "memory", [True]), ("look", "disks", {}),
        ("look", "cards", "net0"), ("look", "devices", {"names": "net0", "digest": "d"}),
        ("room", "images", 1e9), ("room", "missing", ["x" * 5000]),
        ("before", "images", {"vda": "/a.raw"}), ("identity", "owner", [0]),
        ("stand", "port", "22"), ("end", "did", [["x"]]),
    ],
)  # fmt: skip
async def test_each_order_refuses_an_answer_of_another_kind(
    liar: type[Liar], order: str, field: str, lie: object
) -> None:
    liar.said[:] = [{"done": {**_GOOD[order], field: lie}}]
    with pytest.raises(RemoteError, match=r"^liar: invalid message from vmckpt-agent"):
        await protection_agent_client.order(HERE, "u", order)
