"""What is not known of a store is no damage, and what is kept for others stays."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.stocking import PER_CHUNK, Stock, flip, page, stocked
from tests.support.storing import chunks, new_store, write
from vmckpt.agent.restore import lazy_server
from vmckpt.capture.disks.plan import How, Parent, plan
from vmckpt.errors import StoreError
from vmckpt.model.disk import Bitmap, DiskFacts, checkpoint_of
from vmckpt.snapshot.restore import domain_xml
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.pack_writer import Packing
from vmckpt.units import GIB, Bytes

GUEST = "0" * 8 + "-0000-0000-0000-" + "0" * 12
NAMES = [f"n{number}" for number in range(5)]


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def nightly(stock: Stock) -> None:
    for number, name in enumerate(NAMES):
        stock.put(name, [*range(8), 100 + number], tags={"schedule": "nightly"}, guest_uuid=GUEST)


def kept(stock: Stock) -> list[str]:
    assert stock("prune", "--keep-last", "5", "--yes")[0] == 0
    return sorted(one["name"] for one in json.loads(stock("list", "--json")[1]))


@pytest.mark.parametrize("names", [[], NAMES])
def test_a_store_that_gave_no_answer_is_not_damaged_and_nothing_is_pruned_for_it(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    nightly(stock)
    get = LocalFolder.get

    def late(self: LocalFolder, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if key.startswith("packs/") and offset == 0 and length is None:
            raise StoreError(f"{self.where}: {key}: no answer: Read timed out")
        return get(self, key, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "get", late)
        code, _, err = stock("verify", *names)
    assert code != 0
    assert "could not be read" in err
    assert kept(stock) == NAMES
    assert stock("verify", "--deep")[0] == 0


def test_damage_in_a_second_copy_hurts_no_snapshot(stock: Stock) -> None:
    nightly(stock)
    before, sealing = set(stock.packs()), stock.ring.sealing()
    packing = Packing(stock.store().backend, lambda *_: None)
    for first in (0, PER_CHUNK):
        plain = b"".join(page(one) for one in range(first, first + PER_CHUNK))
        digest = sealing.digest_of(plain)
        packing.add(sealing.name_of(digest), sealing.seal(plain, digest), len(plain))
    packing.finish()
    packing.close()
    [second] = set(stock.packs()) - before
    flip(second, 40)
    assert stock("verify")[0] == 41
    told = json.loads(stock("list", "--json")[1])
    assert [one["verified"]["good"] for one in told] == [True] * 5
    assert kept(stock) == NAMES


@pytest.mark.parametrize("warm", [None, ("gc", "--dry-run")])
def test_a_repair_takes_no_pack_away_whose_index_only_we_remember(
    stock: Stock, warm: tuple[str, ...] | None
) -> None:
    stock.put("one", list(range(100)))
    if warm is not None:
        assert stock(*warm)[0] == 0
    big = stock.packs()[0]
    flip(big, big.stat().st_size - 70)
    _, out, _ = stock("verify", "--repair", "--json")
    assert json.loads(out)["repaired"]["chunks_lost"] != {}
    assert big.exists()


def test_keepers_take_back_only_their_own_pins(tmp_path: Path) -> None:
    store, id_ = new_store(tmp_path / "s"), "s-aaaaaaaaaaaaaaaa"
    write(store, id_, chunks(1, 2))
    one, two = (
        SimpleNamespace(snapshot=id_, guest=guest, host="alpha") for guest in ("g1", "g2")
    )  # fmt: skip

    def end(order: Any) -> None:
        lazy_server._end(tmp_path / "f", store, order)

    pin: Any = lazy_server._pin
    pin(store, one)
    pin(store, two)
    end(one)
    assert store.pins() == {id_}
    pin(store, two)  # another keeper of the same goes on
    end(two)
    assert store.pins() == set()
    pin(store, one)
    store.pin(id_, "until the audit is over")
    end(one)
    assert store.pin_reason(id_) == "until the audit is over"


@pytest.mark.parametrize(
    "old",
    [
        "the disks of g1 come in from it on alpha",
        "guest g1 still reads its disks from this snapshot on alpha",
    ],
)
def test_a_pin_of_an_earlier_version_is_still_recognised(tmp_path: Path, old: str) -> None:
    store, id_ = new_store(tmp_path / "s"), "s-aaaaaaaaaaaaaaaa"
    write(store, id_, chunks(1, 2))
    one, two = (
        SimpleNamespace(snapshot=id_, guest=guest, host="alpha") for guest in ("g1", "g2")
    )  # fmt: skip
    pin: Any = lazy_server._pin
    end: Any = lazy_server._end
    new = "guest g2 still needs data from this snapshot on alpha"
    store.pin(id_, old)
    pin(store, one)  # a restarted server of the same guest
    assert store.pin_reason(id_) == old
    pin(store, two)
    assert store.pin_reason(id_) == f"{old}; {new}"
    end(tmp_path / "f", store, one)
    assert store.pin_reason(id_) == new
    end(tmp_path / "f", store, two)
    assert store.pins() == set()


def test_disks_that_changed_places_are_read_whole() -> None:
    parent = Parent(
        id="s-1", made_at=0, sizes={"vda": Bytes(GIB), "vdb": Bytes(GIB)},
        sources={"vda": "/d/root.qcow2", "vdb": "/d/data.qcow2"},
    )  # fmt: skip

    def disk(name: str, source: str) -> DiskFacts:
        return DiskFacts(
            name=name, kind="file", device="disk", format="qcow2", source=source, version=3,
            size=Bytes(GIB), bitmaps=(Bitmap(name=checkpoint_of("s-1")),),
        )  # fmt: skip

    def ways(vda: str, vdb: str) -> list[How]:
        made = plan([disk("vda", f"/d/{vda}"), disk("vdb", f"/d/{vdb}")], parent, ())
        return [one.how for one in made.choices]

    assert ways("root.qcow2", "data.qcow2") == [How.INCREMENTAL] * 2
    assert ways("data.qcow2", "root.qcow2") == [How.FULL] * 2
    assert ways("elsewhere.qcow2", "data.qcow2") == [How.INCREMENTAL] * 2


def test_a_fork_has_its_own_uuid_in_its_firmware_too() -> None:
    xml = (
        "<domain><name>a</name><uuid>1</uuid><sysinfo type='smbios'><system>"
        "<entry name='uuid'>1</entry><entry name='serial'>x</entry></system></sysinfo></domain>"
    )
    made = domain_xml.xml_for_fork(xml, {}, name="f", uuid="2", macs=[], link_up=False)
    assert '<entry name="uuid">2</entry><entry name="serial">x</entry>' in made
