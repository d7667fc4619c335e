"""The hints of `vmckpt snapshot` are commands that help: each is taken from the message and run."""

import asyncio
import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.fixtures.make_store_v1 import BOB, secret
from tests.support.following import take
from tests.support.mounts import mounted
from tests.support.opened_snapshots import serving
from tests.support.stocking import ALICE_KEY, Stock, flip, id_of, page, stocked
from vmckpt import inventory
from vmckpt.app.dashboard_source import Live
from vmckpt.errors import KeyRefused, StoreError
from vmckpt.model.disk import StorePlace
from vmckpt.model.events import Caller
from vmckpt.monitor.health import HealthSnapshot, troubles
from vmckpt.snapshot.group import create
from vmckpt.snapshot.request import Taken
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.key_files import KeyKind, key_text
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.store.repository import Store

BOB_KEY = key_text(KeyKind.ADMIN, public_of(BOB))
STRANGER = OwnKey(secret("another"))


@pytest.fixture
def stock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Stock:
    return stocked(tmp_path, monkeypatch, capsys)


def follow(stock: Stock, message: str, *more: str, **values: str) -> str:
    """Run the commands of the hint in a message; what they printed. `more` answers questions."""
    printed = ""
    for one in take(message, **values):
        assert one.words[:2] == ("vmckpt", "snapshot"), one
        code, out, err = stock(*one.words[2:], *more)
        assert code == 0, err
        printed += out + err
    return printed


def encrypts(stock: Stock) -> bool:
    return bool(json.loads(stock("keys", "list", "--json")[1])["encrypts"])


def test_the_list_of_keys_names_the_command_that_turns_encryption_on(stock: Stock) -> None:
    follow(stock, stock("keys", "list")[1], NAME="alice", KEY=ALICE_KEY)
    assert encrypts(stock)


def test_a_new_identity_is_added_with_the_command_that_it_prints(stock: Stock) -> None:
    follow(stock, stock("keys", "new", "key", "--no-passphrase")[2], NAME="alice")
    stock.put("one", [1])
    assert stock("verify", "--deep", "--identity", "key")[0] == 0


def test_a_key_that_was_added_opens_existing_snapshots_after_the_rotation(stock: Stock) -> None:
    alice = str(stock.encrypt())
    id_ = stock.put("one", [1])
    told = stock("keys", "add", "bob", BOB_KEY)[2]
    follow(stock, told, "--yes", FILE=alice)
    assert len(json.loads(stock("show", "one", "--json")[1])["keys"]) == 2, id_


def test_a_key_that_was_removed_opens_nothing_after_the_rotation(stock: Stock) -> None:
    alice = str(stock.encrypt())
    assert stock("keys", "add", "bob", BOB_KEY)[0] == 0
    stock.put("one", [1])
    follow(stock, stock("keys", "remove", "bob")[2], "--yes", FILE=alice)
    assert len(json.loads(stock("show", "one", "--json")[1])["keys"]) == 1


def test_the_only_key_can_be_dropped_once_another_was_added(stock: Stock) -> None:
    command = ("keys", "rotate", "--identity", str(stock.encrypt()), "--drop", "alice", "--yes")
    code, _, wrong = stock(*command)
    assert code == 43
    follow(stock, wrong, NAME="bob", KEY=BOB_KEY)
    assert stock(*command)[0] == 0


def test_a_key_that_is_not_in_the_list_is_named_by_the_list(stock: Stock) -> None:
    alice = str(stock.encrypt())
    code, _, wrong = stock("keys", "rotate", "--identity", alice, "--drop", "eve", "--yes")
    assert (code, "eve" in follow(stock, wrong)) == (43, False)
    assert stock("keys", "rotate", "--identity", alice, "--yes")[0] == 0


def test_the_name_of_a_key_is_found_in_the_list(stock: Stock) -> None:
    assert stock("keys", "trust", "other", STRANGER_KEY)[0] == 0
    code, _, wrong = stock("keys", "distrust", "othr")
    assert (code, "other" in follow(stock, wrong)) == (43, True)
    assert stock("keys", "distrust", "other")[0] == 0


STRANGER_KEY = key_text(KeyKind.WRITER, STRANGER.public)


def test_a_salt_is_exported_once_a_key_was_added(stock: Stock) -> None:
    code, _, wrong = stock("keys", "export-salt", "salt", "--no-passphrase")
    assert code == 43
    follow(stock, wrong, NAME="alice", KEY=ALICE_KEY)
    assert stock("keys", "export-salt", "salt", "--no-passphrase")[0] == 0


def test_two_controllers_join_one_domain_with_the_commands_that_each_prints(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    stock.encrypt()
    mine = stock.put("one", [1])
    other = tmp_path / "other"
    other.mkdir()
    with monkeypatch.context() as there:
        joined = stocked(other, there, capsys)
        shutil.rmtree(other / "near")
        (other / "near").symlink_to(stock.folder / "near")
        code, _, wrong = joined("keys", "import-salt", "salt")
        assert code == 43
    (export,) = take(wrong, FILE="salt")  # on the first controller
    code, _, told = stock(*export.words[2:], "--no-passphrase")
    assert code == 0
    shutil.copy(stock.folder / "salt", other / "salt")
    writer = json.loads(stock("keys", "list", "--json")[1])["writer"]["key"]
    with monkeypatch.context() as there:
        there.chdir(other)
        there.setenv("VMCKPT_STATE", str(other / "state"))
        (join,) = take(told, FILE="salt")
        code, _, said = joined(*join.words[2:])
        assert code == 0, said
        encryption, trust = said.strip().split("\n")
        follow(joined, encryption, NAME="alice", KEY=ALICE_KEY)
        assert encrypts(joined)
        follow(joined, trust, NAME="first", KEY=writer)
        assert mine in joined("list")[1]
    assert joined.ring.domain() == stock.ring.domain()


def test_a_snapshot_of_an_unknown_writer_is_verified_once_the_writer_is_trusted(
    stock: Stock,
) -> None:
    alice = str(stock.encrypt())
    stock.put("one", [1], signer=STRANGER)
    code, told, wrong = stock("verify", "--deep", "--identity", alice)
    assert code != 0
    follow(stock, told + wrong, NAME="other", KEY=STRANGER_KEY)
    assert stock("verify", "--deep", "--identity", alice)[0] == 0


def test_a_pinned_snapshot_is_deleted_after_the_command_that_unpins_it(stock: Stock) -> None:
    stock.put("one", [1])
    assert stock("pin", "one")[0] == 0
    follow(stock, stock("delete", "one", "--yes")[2])
    assert stock("delete", "one", "--yes")[0] == 0


def test_an_unknown_snapshot_is_found_in_the_list(stock: Stock) -> None:
    stock.put("one", [1])
    code, _, wrong = stock("show", "three")
    assert (code, "one" in follow(stock, wrong)) == (45, True)


def test_a_snapshot_without_a_schedule_is_deleted_by_name(stock: Stock) -> None:
    stock.put("mine", [1])
    follow(stock, stock("prune", "--keep-last", "1")[2], "--yes", SNAPSHOT="mine")
    assert list(stock.store().manifests()) == []


def test_a_store_is_created_where_there_is_none(stock: Stock) -> None:
    shutil.rmtree(stock.folder / "near")
    code, _, wrong = stock("list", "--store", "near")
    assert code != 0
    follow(stock, wrong)
    assert stock("list", "--store", "near")[0] == 0


def test_a_folder_that_is_no_store_becomes_one(stock: Stock) -> None:
    shutil.rmtree(stock.folder / "near")
    (stock.folder / "near").mkdir()
    code, _, wrong = stock("list", "--store", "near")
    assert code != 0
    follow(stock, wrong)
    assert stock("list", "--store", "near")[0] == 0


@pytest.fixture
def harmed(stock: Stock) -> Stock:
    """A snapshot in two stores, and a third one that shares no chunk with it."""
    stock.put("one", list(range(40)))
    assert stock("copy", "one", "--to", "far")[0] == 0
    return stock


def test_damage_is_repaired_from_the_other_store(harmed: Stock) -> None:
    harmed.packs()[0].unlink()
    code, told, wrong = harmed("verify", "--deep")
    assert code == 41
    follow(harmed, told + wrong, STORE="far")
    assert harmed("verify", "--deep")[0] == 0


def test_damage_that_a_copy_finds_is_named_by_verify(harmed: Stock) -> None:
    shutil.rmtree(harmed.folder / "far")
    assert harmed("init", "--store", "far")[0] == 0
    flip(harmed.packs()[0], 5000)
    code, _, wrong = harmed("copy", "one", "--to", "far")
    assert code == 41
    (verify,) = take(wrong)
    code, told, _ = harmed(*verify.words[2:])
    assert (code, id_of("one") in told) == (41, True), told


def test_a_chunk_that_cannot_be_read_is_named_with_its_snapshots_by_verify(harmed: Stock) -> None:
    harmed.packs()[0].unlink()
    code, _, wrong = harmed("export", "one", "file")
    assert code == 41
    (verify,) = take(wrong)
    code, told, _ = harmed(*verify.words[2:])
    assert (code, id_of("one") in told) == (41, True), told


def test_a_damaged_manifest_comes_back_from_the_other_store(harmed: Stock) -> None:
    flip(harmed.folder / "near" / "snapshots" / id_of("one"), 300)
    code, _, wrong = harmed("gc", "--grace", "0s")
    assert code == 41
    follow(harmed, wrong, STORE="far")
    assert harmed("gc", "--grace", "0s")[0] == 0


def test_an_identity_that_others_can_read_is_closed_by_the_command(stock: Stock) -> None:
    alice = stock.encrypt()
    stock.put("one", [1])
    alice.chmod(0o644)
    code, _, wrong = stock("verify", "--deep", "--identity", str(alice))
    assert code == 43, wrong
    (command,) = take(wrong)
    subprocess.run(command.words, check=True)
    assert stock("verify", "--deep", "--identity", str(alice))[0] == 0


def test_what_a_rotation_left_is_named_by_verify_and_done_with_the_right_identity(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = str(stock.encrypt())
    one = stock.put("one", [1])
    stock.put("two", [2])
    assert stock("keys", "add", "bob", BOB_KEY)[0] == 0
    bob = str(stock.identity("bob"))
    phrase = stock.folder / "phrase"
    phrase.write_text("correct horse\n")
    phrase.chmod(0o600)
    monkeypatch.setenv("VMCKPT_PASSPHRASE_FILE", str(phrase))
    code, _, wrong = stock("keys", "rotate", "--identity", bob, "--yes")
    assert code == 43
    follow(stock, wrong, "--identity", alice, "--yes")
    flip(stock.folder / "near" / "snapshots" / one, 300)
    code, _, wrong = stock("keys", "rotate", "--identity", alice, "--yes")
    assert code == 41
    (verify,) = take(wrong)
    code, told, _ = stock(*verify.words[2:])
    assert (code, one in told) == (41, True)


def test_a_snapshot_for_another_key_is_opened_with_the_key_that_show_names(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = str(stock.encrypt())
    stock.put("one", [1])
    stock.put("two", [2])
    phrase = stock.folder / "phrase"
    phrase.write_text("correct horse\n")
    phrase.chmod(0o600)
    monkeypatch.setenv("VMCKPT_PASSPHRASE_FILE", str(phrase))
    code, _, wrong = stock("diff", "one", "two", "--identity", str(stock.identity("bob")))
    assert (code, "alice" in follow(stock, wrong)) == (43, True)
    assert stock("diff", "one", "two", "--identity", alice)[0] == 0


def test_a_salt_without_a_key_is_completed_by_the_key(stock: Stock) -> None:
    stock.encrypt()
    assert stock("keys", "export-salt", "salt", "--no-passphrase")[0] == 0
    for path in (stock.folder / "state/keys").rglob("alice*"):
        path.unlink()
    with pytest.raises(KeyRefused) as caught:
        stock.ring.sealing()
    follow(stock, str(caught.value), NAME="alice", KEY=ALICE_KEY)
    assert stock.ring.sealing()


def test_a_chunk_that_another_store_provided_is_repaired_from_there(harmed: Stock) -> None:
    harmed.packs()[0].unlink()
    code, _, wrong = harmed("verify", id_of("one"))
    follow(harmed, wrong, STORE="far")
    assert (code, harmed("verify", id_of("one"))[0]) == (41, 0)


def test_a_damaged_format_file_is_named_by_verify(harmed: Stock) -> None:
    path = harmed.folder / "near" / "format"
    whole = path.read_bytes()
    flip(path, 20)
    code, _, wrong = harmed("list", "--store", "near")
    assert code == 41
    (verify,) = take(wrong)
    code, told, said = harmed(*verify.words[2:])
    assert (code, "format" in told + said) == (41, True)
    path.write_bytes(whole)
    assert harmed("verify")[0] == 0


def test_two_snapshots_with_one_id_are_told_apart_by_verify(harmed: Stock) -> None:
    shutil.rmtree(harmed.folder / "far")
    assert harmed("init", "--store", "far")[0] == 0
    harmed.put("one", [7], in_="far")
    code, _, wrong = harmed("copy", "one", "--to", "far")
    (verify,) = take(wrong)
    assert code == 2
    for store in ("near", "far"):
        assert harmed(*verify.words[2:], "--store", store)[0] == 0


def test_a_full_store_has_room_after_the_commands_that_it_names(stock: Stock) -> None:
    stock.put("one", list(range(400)))
    stock.put("two", list(range(1000, 1400)))
    shutil.rmtree(stock.folder / "far")
    with mounted(stock.folder / "far", "tmpfs", "size=3m", None):
        assert stock("init", "--store", "far")[0] == 0
        assert stock("copy", "one", "--to", "far")[0] == 0
        code, _, wrong = stock("copy", "two", "--to", "far")
        assert code == 44
        delete, collect = take(wrong, SNAPSHOT="one")
        assert "--grace 0s, twice" in wrong
        assert stock(*delete.words[2:], "--store", "far", "--yes")[0] == 0
        for _ in range(2):
            assert stock(*collect.words[2:], "--store", "far")[0] == 0
        assert stock("copy", "two", "--to", "far")[0] == 0


def test_a_store_without_room_for_a_lock_does_not_ask_for_a_collection(stock: Stock) -> None:
    """The collection would need a lock, too."""
    shutil.rmtree(stock.folder / "far")
    with mounted(stock.folder / "far", "tmpfs", "size=1m", None):
        assert stock("init", "--store", "far")[0] == 0
        with suppress(OSError), (stock.folder / "far" / "other").open("wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
        code, _, wrong = stock("gc", "--store", "far")
        assert (code, "run vmckpt" in wrong, "free some space" in wrong) == (44, False, True)


def test_a_damaged_chunk_is_named_with_its_snapshots_by_verify(stock: Stock) -> None:
    stock.put("one", list(range(40)))
    flip(stock.packs()[0], 5000)
    code, _, wrong = stock("open", "one", "--core", "core")
    assert code == 41
    (verify,) = take(wrong)
    code, told, _ = stock(*verify.words[2:])
    assert (code, f"needed by {id_of('one')}" in told) == (41, True), told


def test_a_snapshot_of_an_unknown_writer_is_opened_once_the_writer_is_trusted(
    stock: Stock,
) -> None:
    stock.put("one", [1], signer=STRANGER)
    code, _, wrong = stock("open", "one", "--core", "core")
    assert code == 43
    follow(stock, wrong, NAME="other")
    assert stock("open", "one", "--core", "core")[0] == 0


def test_a_store_that_did_not_answer_is_verified_once_it_does(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.put("one", [1])
    get = LocalFolder.get

    def fails(self: LocalFolder, key: str, offset: int = 0, length: int | None = None) -> bytes:
        if key.startswith("packs/"):
            raise StoreError(f"{self.where}: {key}: Input/output error")
        return get(self, key, offset, length)

    with monkeypatch.context() as while_broken:
        while_broken.setattr(LocalFolder, "get", fails)
        code, told, wrong = stock("verify")
    assert code == 40, told
    follow(stock, wrong)


def test_an_alert_names_the_store_of_a_damaged_snapshot(harmed: Stock) -> None:
    harmed.packs("far")[0].unlink()
    assert harmed("verify", "--store", "far")[0] == 41  # and notes what it found
    known = inventory.load(harmed.folder / "hosts.yaml")
    seen = HealthSnapshot(snapshots=asyncio.run(Live(known).snapshots()))
    (alert,) = troubles(seen).values()
    verify, repair = take(alert.hint, STORE="near")
    assert harmed(*verify.words[2:])[0] == 41
    assert harmed(*repair.words[2:])[0] == 0
    assert harmed(*verify.words[2:])[0] == 0


def test_what_a_group_snapshot_left_in_a_store_is_deleted(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = stock.put("one", [1], in_="far")
    nothing: Any = None
    taken = [cast("Taken", SimpleNamespace(id=id_))]
    caller = Caller(emit=lambda _: None, warn=lambda _: None, stop=asyncio.Event())
    place = StorePlace(name="far", url=str(stock.folder / "far"))
    with monkeypatch.context() as while_broken:
        while_broken.setattr(Store, "delete", refused)
        group = create._Group([], place, nothing, caller)
        failed = asyncio.run(group._failed([], taken))
    follow(stock, str(failed), "--yes")
    assert list(stock.store("far").manifests()) == []


def refused(*_: object) -> None:
    raise StoreError("the store does not answer")


def test_data_of_a_disk_that_cannot_be_restored_is_copied_from_the_open_snapshot(
    stock: Stock,
) -> None:
    stock.put("one", [1, 2], disk=7, domain_xml=(
        "<domain type='test'><name>web1</name><memory>65536</memory><os><type>hvm</type></os>"
        "<devices><disk type='network' device='disk'><source protocol='rbd' name='pool/web1'/>"
        "<target dev='vda'/></disk></devices></domain>"
    ))  # fmt: skip
    code, _, wrong = stock("restore", "one", "--on", "alpha")
    assert (code, "is of type network (pool/web1)" in wrong) == (2, True), wrong
    (command,) = take(wrong, SNAPSHOT="one")
    assert command.words == ("vmckpt", "snapshot", "open", "one")
    with serving() as told:
        copy = ("qemu-img", "convert", "-O", "raw", told["exports"]["vda"], "disk.raw")
        subprocess.run(copy, check=True)
    assert Path("disk.raw").read_bytes() == page(7, 65536)
