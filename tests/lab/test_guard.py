"""A risky command under guard: the guest stays as it becomes, or goes back."""

import signal

import pytest

from tests.lab.bench import Bench, finish, first_line
from tests.lab.snapshots import SMALL, ids, left, proofs


@pytest.mark.long
def test_a_check_that_fails_takes_the_guest_back(kept: Bench) -> None:
    kept.guest(**SMALL)
    before = kept.seen().highest
    # The guest must be dead in between, so that coming back is no accident.
    kill = ["virsh", "-c", kept.inventory.host("alpha").uri, "destroy", "web1"]
    done = kept.run("guard", "web1", "--json", "--on-restore", "echo from $VMCKPT_MADE_AT >&2",
                    "--check-for", "1s", "--", *kill)  # fmt: skip
    assert done.code == 23, done.err
    told = done.json
    assert (told["ending"], told["command_status"]) == ("back", 0)
    assert told["why"] == "the guest is shut off on alpha"
    assert told["restored"]["hook_status"] == 0
    assert "from 20" in done.err
    assert kept.where() == ["alpha"]
    assert proofs(kept) == []
    assert kept.seen().highest >= before
    assert (ids(kept), left(kept)) == ([told["snapshot"]["id"]], [])


@pytest.mark.long
def test_a_command_that_does_well_keeps_what_it_made(kept: Bench) -> None:
    kept.guest(**SMALL)
    check = "test -e {0} || { touch {0}; exit 1; }".replace("{0}", str(kept.plan.folder / "tried"))
    done = kept.run("guard", "web1", "--json", "--check", check, "--", "sh", "-c", "echo hello")
    assert done.code == 0, done.err
    assert (done.json["ending"], done.json["checks"]) == ("kept", 2)
    assert "hello" in done.err
    assert kept.ledgers() == {"memory": True, "disk": True, "output": True}
    listed = kept.good("snapshot", "list", "--json").json
    assert [one["tags"] for one in listed] == [{"guard": "sh"}]
    dropped = kept.good("guard", "web1", "--drop", "--json", "--", "true").json
    assert dropped["ending"] == "dropped"
    assert len(ids(kept)) == 1


@pytest.mark.long
def test_ctrl_c_goes_back(kept: Bench) -> None:
    kept.guest(**SMALL)
    guard = kept.start("guard", "web1", "--", "sh", "-c", "echo begun >&2; exec sleep 60")
    first_line(guard, "begun")
    guard.send_signal(signal.SIGINT)
    done = finish(guard)
    assert (done.code, "was restored to s-" in done.err) == (130, True), done.err
    assert proofs(kept) == []
    assert left(kept) == []


@pytest.mark.long
def test_a_killed_guard_leaves_the_checkpoint_and_says_the_way_back(kept: Bench) -> None:
    kept.guest(**SMALL)
    guard = kept.start("guard", "web1", "--", "sh", "-c", "echo begun >&2; exec sleep 5")
    first_line(guard, "begun")
    guard.kill()
    finish(guard)
    (id_,) = ids(kept)
    (one,) = kept.good("recover", "--json").json
    assert (one["kind"], one["outcome"]) == ("guard", "failed")
    assert f"vmckpt snapshot restore {id_} --store near --replace" in one["did"][0]
    kept.good("snapshot", "restore", id_, "--replace")
    assert proofs(kept) == []


@pytest.mark.long
def test_without_the_right_key_nothing_is_begun(kept: Bench) -> None:
    kept.guest(**SMALL)
    keys = kept.plan.folder / "state" / "keys"
    folder = kept.plan.folder
    try:
        new = ("snapshot", "keys", "new", "--no-passphrase")
        kept.good(*new, str(folder / "other.key"))
        public = kept.good(*new, str(folder / "ours.key")).out.strip()
        kept.good("snapshot", "keys", "add", "ours", public)
        for more in ([], ["--identity", str(folder / "other.key")]):
            done = kept.run("guard", "web1", *more, "--", "touch", str(folder / "ran"))
            assert (done.code, "nothing was done" in done.err) == (43, True)
        assert (ids(kept), (folder / "ran").exists()) == ([], False)
        ours = str(folder / "ours.key")
        done = kept.run("guard", "web1", "--identity", ours, "--", "false")
        assert done.code == 23, done.err
        assert proofs(kept) == []
    finally:
        for path in [*sorted(keys.rglob("*"), reverse=True), *folder.glob("*.key")]:
            path.unlink() if path.is_file() else path.rmdir()
