"""vmckpt snapshot pin, delete, prune, gc and copy."""

import json
import subprocess
import sys

import pytest
from blake3 import blake3

from tests.fixtures.make_store_v1 import BOB, secret
from tests.support.mounts import mounted
from tests.support.stocking import Stock, flip, id_of, scheduled, stock
from vmckpt.errors import StoreError
from vmckpt.journal.store import Journal
from vmckpt.store.backend.local import LocalFolder
from vmckpt.store.format import pack
from vmckpt.store.keys import wrapped_keys
from vmckpt.store.keys.identity import public_of
from vmckpt.store.keys.keyring import OwnKey
from vmckpt.store.receive import Receiver
from vmckpt.store.repository import Store

STRANGER = OwnKey(secret("a stranger"))


def ids(stock: Stock, name: str = "near") -> set[str]:
    return {one.id for one in stock.store(name).manifests()}


def test_what_is_done_to_snapshots_is_in_the_audit_trail(stock: Stock) -> None:
    id_ = stock.put("one", [1])
    assert stock("unpin", "one")[0] == 0
    assert stock("delete", "one", "--yes")[:2] == (0, f"{id_} was deleted\n")
    with Journal() as journal:
        deeds = [one.fact.deed for one in journal.audit()]
    assert [(one.what, one.step) for one in deeds] == [
        ("allowed", "vmckpt snapshot unpin one"), ("allowed", "vmckpt snapshot delete one"),
    ]  # fmt: skip


def test_what_is_pinned_is_not_deleted(stock: Stock) -> None:
    id_ = stock.put("one", [1])

    assert stock("pin", "one", "--why", "audit") == (0, f"{id_} is pinned\n", "")
    code, _, wrong = stock("delete", "one", "--yes")
    assert (code, f"unpin {id_}" in wrong) == (2, True)
    assert json.loads(stock("unpin", "one", "--json")[1]) == {"id": id_, "pinned": False}
    assert json.loads(stock("delete", "one", "--yes", "--json")[1]) == {"deleted": [id_]}
    assert ids(stock) == set()
    assert stock("pin", "one")[0] == 45


def test_deleting_asks_and_nobody_there_is_no_yes(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = stock.put("one", [1])

    code, _, wrong = stock("delete", "one")
    assert (code, f"permanently delete {id_} (one of web1)" in wrong) == (2, True)
    assert "add --yes" in wrong
    answers = iter([False, True])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("typer.confirm", lambda *_, **__: next(answers))
    assert stock("delete", "one")[0] == 130
    assert ids(stock) == {id_}
    assert stock("delete", "one")[0] == 0
    assert ids(stock) == set()


@pytest.mark.parametrize(
    "args",
    [
        ("pin", "one"), ("unpin", "one"), ("delete", "one", "--yes"), ("prune", "--keep-last", "1"),
        ("gc",), ("copy", "one", "--to", "far"), ("import", "file"),
        ("keys", "new", "k", "--no-passphrase"),
        ("keys", "remove", "alice"), ("keys", "rotate", "--identity", "alice.key", "--yes"),
    ],
)  # fmt: skip
def test_who_may_only_look_changes_nothing(
    stock: Stock, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...]
) -> None:
    stock.encrypt()
    stock.put("one", [1])
    monkeypatch.setenv("VMCKPT_READ_ONLY", "1")

    code, _, wrong = stock(*args)
    assert (code, "read-only mode forbids this command; nothing was changed" in wrong) == (5, True)
    assert stock("gc", "--dry-run")[0] == 0
    assert stock("verify")[0] == 0


def test_pruning_deletes_what_no_rule_keeps_and_says_why(stock: Stock) -> None:
    made = scheduled(stock)

    code, told, _ = stock("prune", "--keep-last", "1", "--dry-run")
    assert (code, ids(stock)) == (0, {*made, id_of("by hand")})
    rows = {line.split()[0]: line for line in told.splitlines()}
    assert "keep" in rows[made[3]]
    assert "last 1 of 1" in rows[made[3]]
    assert rows[made[2]].split()[-5:] == ["not", "kept", "by", "any", "rule"]
    assert "pinned" in rows[made[0]]
    assert "not made by a schedule" in rows[id_of("by hand")]
    assert "2 of 5 to be deleted" in told
    code, _, wrong = stock("prune", "--keep-last", "1")
    assert code == 2
    assert "permanently delete 2 of 5 snapshots: stdin is not a terminal" in wrong
    code, told, _ = stock("prune", "--keep-last", "1", "--yes", "--json")
    assert json.loads(told)["deleted"] == [made[1], made[2]]
    assert ids(stock) == {made[0], made[3], id_of("by hand")}


def test_pruning_counts_only_what_trusted_writers_signed_and_can_be_read(stock: Stock) -> None:
    made = scheduled(stock)
    for number in range(5):
        stock.put(f"x{number}", [number], tags={"schedule": "nightly"}, signer=STRANGER)
    flip(stock.folder / "near" / "snapshots" / made[3], 400)

    told = json.loads(stock("prune", "--keep-last", "2", "--dry-run", "--json")[1])
    fates = {one["id"]: one for one in told["snapshots"]}
    assert [id_ for id_ in made if not fates[id_]["stays"]] == []
    assert fates[made[3]]["reasons"] == ["cannot be read: its checksum is wrong"]
    assert fates[id_of("x0")]["reasons"] == ["its writer is not trusted"]


def test_pruning_needs_a_rule_and_one_schedule(stock: Stock) -> None:
    stock.put("mine", [1])
    assert "made by a schedule" in stock("prune", "--keep-last", "1")[2]
    scheduled(stock)
    stock.put("weekly", [2], tags={"schedule": "weekly"})

    code, _, wrong = stock("prune")
    assert (code, "several schedules: nightly, weekly; choose one" in wrong) == (2, True)
    code, _, wrong = stock("prune", "--schedule", "nightly")
    assert (code, "no retention rule was given" in wrong) == (2, True)
    assert (
        "no snapshot in the store"
        in stock("prune", "--schedule", "x", "--keep-last", "1", "--dry-run")[2]
    )
    assert stock("prune", "--schedule", "nightly", "--keep-daily", "1", "--yes")[0] == 0
    assert id_of("weekly") in ids(stock)


def test_a_collection_removes_what_was_deleted_in_two_steps(stock: Stock) -> None:
    stock.put("one", [1, 2, 3])
    stock.put("two", [7])
    assert stock("delete", "two", "--yes")[0] == 0

    told = json.loads(stock("gc", "--grace", "0s", "--dry-run", "--json")[1])
    assert (told["dry_run"], told["condemned"], told["removed"]) == (True, 1, 0)
    before = len(stock.packs())
    code, told, _ = stock("gc", "--grace", "0s")
    assert (code, "1 marked for deletion" in told) == (0, True)
    code, told, _ = stock("gc", "--grace", "0s")
    assert (code, "1 object removed" in told) == (0, True)
    assert len(stock.packs()) == before - 1
    assert stock("verify", "--deep")[0] == 0
    assert stock("gc", "--grace", "soon")[0] == 2


def test_a_snapshot_is_copied_without_a_key_and_reads_there(stock: Stock) -> None:
    key = str(stock.encrypt())
    one, two = stock.put("one", list(range(40))), stock.put("two", [*range(40), 77])

    told = json.loads(stock("copy", "one", "two", "--to", "far", "--json")[1])
    assert [(part["id"], part["new_chunks"], part["chunks"]) for part in told] == [
        (one, 12, 12), (two, 1, 13),
    ]  # fmt: skip
    assert stock("verify", "--deep", "--identity", key, "--store", "far")[0] == 0
    for id_ in (one, two):
        assert stock.store("far").manifest(id_) == stock.store().manifest(id_)
        assert stock.store("far").wraps(id_) == stock.store().wraps(id_)
    code, told_, _ = stock("copy", "one", "--to", "far")
    assert (code, "already in far" in told_) == (0, True)
    code, _, wrong = stock("copy", "one", "--to", "near")
    assert (code, "are the same store" in wrong) == (2, True)
    assert stock("copy", "one", "--to", "nowhere")[0] == 3


def test_a_copy_does_not_even_read_what_is_there(stock: Stock) -> None:
    stock.put("one", list(range(40)))
    stock.put("two", [*range(40), 77])
    assert stock("copy", "one", "--to", "far")[0] == 0
    for path in stock.packs()[:-1]:
        path.unlink()

    code, told, _ = stock("copy", "two", "--to", "far")
    assert (code, "1 of 13 chunks new" in told) == (0, True)


def test_a_copy_that_broke_off_goes_on_where_it_was(
    stock: Stock, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock.put("one", list(range(80)))
    whole, tries = Store.receiver, []

    def small(store: Store, *, encrypted: bool) -> Receiver:
        return whole(store, encrypted=encrypted, pack_size=70_000)

    def put(backend: LocalFolder, key: str, data: bytes, *, replace: bool = False) -> bool:
        if key.startswith("packs/") and "far" in backend.where:
            tries.append(key)
            if len(tries) == 3:
                raise StoreError("the network is away")
        return really(backend, key, data, replace=replace)

    really = LocalFolder.put
    monkeypatch.setattr(Store, "receiver", small)
    monkeypatch.setattr(LocalFolder, "put", put)
    code, _, wrong = stock("copy", "one", "--to", "far")
    assert (code, wrong) == (40, "error: the network is away\n")
    assert ids(stock, "far") == set()
    assert list(stock.store("far").backend.keys("locks/")) == []
    told = json.loads(stock("copy", "one", "--to", "far", "--json")[1])
    assert 0 < told[0]["new_chunks"] < told[0]["chunks"]
    assert stock("verify", "--deep", "--store", "far")[0] == 0


def test_a_copy_takes_what_is_whole_and_follows_a_collection(stock: Stock) -> None:
    stock.put("one", list(range(16)))
    store = stock.store()
    rows = pack.parse(stock.packs()[0].name, stock.packs()[0].read_bytes()).rows
    first = rows.tolist()[0]
    box = stock.packs()[0].read_bytes()[first[1] : first[1] + first[2]]
    flip(stock.packs()[0], first[1])
    assert stock("copy", "one", "--to", "far")[0] == 41
    # The same chunk, whole, in another pack.
    data = pack.encode([(first[0], box, first[3])], bytes(16))
    store.backend.put(pack.key_of(blake3(data).hexdigest()), data)
    assert stock("copy", "one", "--to", "far")[0] == 0
    assert stock("verify", "--deep", "--store", "far")[0] == 0


def test_a_full_disk_and_a_read_only_store_are_one_clear_line(stock: Stock) -> None:
    stock.encrypt()
    id_ = stock.put("one", list(range(400)))
    key = str(stock.identity("alice"))
    (stock.folder / "far").rename(stock.folder / "away")
    with mounted(stock.folder / "far", "tmpfs", "size=1m", None):
        Store.create(LocalFolder(stock.folder / "far"))
        code, _, wrong = stock("copy", "one", "--to", "far")
        assert (code, len(wrong.splitlines()), "no space left" in wrong) == (44, 1, True)
        assert ids(stock, "far") == set()
        code, _, wrong = stock("export", "one", "far/file")
        assert (code, wrong) == (44, "error: far/file: no space left; free some space there\n")
        assert [path.name for path in (stock.folder / "far").glob(".file*")] == []
    (stock.folder / "far").rmdir()
    with mounted(stock.folder / "far", "none", "bind", stock.folder / "near"):
        for args in (
            ("pin", "one"), ("delete", "one", "--yes"), ("gc",),
            ("keys", "rotate", "--identity", key, "--yes"), ("import", "file"),
        ):  # fmt: skip
            if args[0] == "import":
                assert stock("export", "one", "file", "--store", "far")[0] == 0
                subprocess.run(["rm", stock.folder / "near" / "snapshots" / id_], check=True)
            code, _, wrong = stock(*args, "--store", "far")
            assert (code, len(wrong.splitlines())) == (40, 1), args
            assert "read-only file system; check the owner, the mode and the mount options" in wrong
        assert stock("verify", "--store", "far")[0] == 0
        assert stock("gc", "--dry-run", "--store", "far")[0] == 0


def test_wraps_of_somebody_else_do_not_come_along(stock: Stock) -> None:
    stock.encrypt()
    id_ = stock.put("one", [1])
    wraps = wrapped_keys.wrap(secret("x"), id_, [public_of(BOB)])
    stock.store().put_wraps(id_, wraps[:-1] + bytes([wraps[-1] ^ 1]))
    for args in (("copy", "one", "--to", "far"), ("export", "one", "file")):
        code, _, wrong = stock(*args)
        assert (code, f"wraps/{id_}: its checksum is wrong" in wrong) == (41, True)
    assert ids(stock, "far") == set()


__all__ = ["stock"]
