"""What hosts are asked for doctor, and what their answers mean."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.builders import HOST, host_facts
from vmckpt.doctor import gather
from vmckpt.errors import FencingFailed, RemoteError
from vmckpt.hypervisor import same_host
from vmckpt.hypervisor.connection import Hypervisor
from vmckpt.model.fencing import FenceDevice, FenceTopology, Ran
from vmckpt.model.host import Host, HostFacts
from vmckpt.model.same_host import SameUuid
from vmckpt.remote import fence_agent


async def test_one_host_alone_is_held_against_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """`doctor alpha` said nothing of a host UUID that beta has, too: libvirt refuses every move."""
    uuids = {"alpha": "u", "beta": "u", "gamma": "other"}
    all_hosts = [replace(HOST, name=name, ssh=None) for name in (*uuids, "silent")]

    async def asked(host: Host) -> tuple[HostFacts | None, str | None]:
        uuid = uuids.get(host.name)
        return (None, "no answer") if uuid is None else (host_facts(uuid), None)

    pair = SameUuid(first="alpha", second="beta", one=True)

    async def among(hosts: Sequence[Hypervisor]) -> tuple[SameUuid, ...]:
        assert [one.host.name for one in hosts] == ["alpha", "beta"]
        return (pair,)

    monkeypatch.setattr(gather, "_facts", asked)
    monkeypatch.setattr(same_host, "among", among)
    (alone,) = await gather.examine(all_hosts[:1], all_hosts)
    assert alone.twins == (pair,)
    found = await gather.examine(all_hosts, all_hosts)
    assert [one.twins for one in found] == [(pair,), (pair,), (), ()]


async def test_text_and_hint_of_an_error_are_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_login(_: Host) -> None:
        raise RemoteError("alpha: refused; closed", hint="set key_file")

    async def no_agent(*_: object, **__: object) -> Ran:
        raise FencingFailed("alpha is not fenced: no agent; looked in /usr", hint="install it")

    monkeypatch.setattr(gather, "Remote", no_login)
    monkeypatch.setattr(fence_agent, "run", no_agent)
    login = await gather._over_ssh(HOST, [HOST])
    topology = FenceTopology(levels=((FenceDevice(agent="fence_ipmilan", options={}),),))
    device = await gather._device(HOST, topology, 0, 0)
    assert (login.probe_error, login.probe_hint) == ("alpha: refused; closed", "set key_file")
    assert (device.error, device.hint) == (
        "alpha is not fenced: no agent; looked in /usr", "install it",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "room", "near"),
    [
        ("room 5000\n", 5000, None),
        ("", None, None),
        ("room 1e9\nabsent /near\n", None, "there is no store at /near"),
        ("hello\nroom 1\nclosed /near\nclosed /other\n", 1, "/near is not writable"),
    ],
)
def test_what_a_host_answers(text: str, room: int | None, near: str | None) -> None:
    found = gather.parse_answer(HOST, {"near": "/near"}, text, None)
    assert (found.room, dict(found.stores)) == (room, {"near": near})
