"""What an agent leaves for the next one to begin with."""

import json
import os
import resource
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.support.replicas import LEASE, session
from vmckpt.errors import BadInput, RemoteError
from vmckpt.replication import session as replication_session
from vmckpt.replication.session import ProtectionTerms, Session, folder_of
from vmckpt.units import Seconds
from vmckpt.util import host_directories

ALL = session(
    lease=LEASE, cards=("net0", "net1"), undo="{}", definition="<domain/>", state="/var/x",
    terms=ProtectionTerms(interval=None, automatic=True, slowdown=0.2, hold=Seconds(1.0)),
)  # fmt: skip


@pytest.mark.parametrize("written", [ALL, session(), session(disks=(), role="backup", extra={})])
def test_a_new_agent_reads_what_the_one_before_has_written(
    tmp_path: Path, written: Session
) -> None:
    folder = tmp_path / "not" / "there"
    written.write(folder)
    assert Session.read(folder) == written
    assert Session.from_json(asdict(written)) == written


def test_what_it_has_is_for_root_alone(tmp_path: Path) -> None:
    """It holds the lease's password."""
    ALL.write(tmp_path)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert "secret" in path.read_text()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    session().write(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            ALL.write(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert Session.read(tmp_path) == session()


def test_where_nothing_is_there_is_no_session(tmp_path: Path) -> None:
    assert Session.read(tmp_path) is None
    assert Session.read(tmp_path / "nowhere") is None


def without(name: str) -> str:
    told = asdict(ALL)
    del told[name]
    return json.dumps(told)


@pytest.mark.parametrize("text", [
    "", "{", "[]", "7", "null", "{}", "\udcff", without("lease"), without("terms"),
    without("session"), json.dumps({**asdict(ALL), "newer": 1}),
    json.dumps({**asdict(ALL), "disks": 7}), json.dumps({**asdict(ALL), "terms": {"x": 1}}),
    json.dumps({**asdict(ALL), "lease": {"url": "x"}}),
])  # fmt: skip
def test_a_file_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "session.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BadInput, match=r"session\.json cannot be read as a session"):
        Session.read(tmp_path)


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where earlier versions had their folders, as long as the test lasts."""
    monkeypatch.setattr(host_directories, "RUN", tmp_path / "run")
    monkeypatch.setattr(host_directories, "SHM", tmp_path)
    monkeypatch.setattr(replication_session, "EARLIER", tmp_path / "earlier")
    (tmp_path / "earlier").mkdir()
    return tmp_path / "earlier"


def test_each_guest_has_a_folder_of_its_own_that_goes_as_a_whole(earlier: Path) -> None:
    made = replication_session.make_folder("u-1")
    assert folder_of("u-1") == made != replication_session.make_folder("u-2")
    memory = replication_session.memory_of(made)
    (memory / "last-0").touch()
    assert memory.parent.parent.parent == host_directories.SHM == earlier.parent
    assert replication_session.make_folder("u-1") == made
    assert replication_session.memory_of(made) == memory
    replication_session.remove_folder(made)
    assert not made.exists()
    assert not memory.exists()
    replication_session.remove_folder(made)


def test_a_protection_of_an_earlier_version_is_found(earlier: Path) -> None:
    (earlier / "u-1").mkdir(mode=0o711)
    assert folder_of("u-1") == replication_session.memory_of(folder_of("u-1")) == earlier / "u-1"
    replication_session.make_folder("u-1")
    assert folder_of("u-1") == host_directories.RUN / "replication/u-1"


def test_memory_that_another_user_made_in_its_place_is_refused_and_left_alone(
    earlier: Path,
) -> None:
    """Ours was removed, and everybody may make a directory on /dev/shm."""
    assert earlier.exists()
    made = replication_session.make_folder("u-1")
    memory = replication_session.memory_of(made)
    memory.rmdir()
    memory.mkdir()
    os.chown(memory, 65534, 65534)
    with pytest.raises(RemoteError, match="belongs to user 65534"):
        replication_session.memory_of(made)
    replication_session.remove_folder(made)
    assert (made.exists(), memory.exists()) == (False, True)


def test_what_another_user_put_there_is_not_listened_to(earlier: Path) -> None:
    (earlier / "u-1").mkdir()
    os.chown(earlier, 65534, 65534)
    assert folder_of("u-1") == host_directories.RUN / "replication/u-1"
    os.chown(replication_session.make_folder("u-2"), 65534, 65534)
    with pytest.raises(RemoteError, match="belongs to user 65534"):
        folder_of("u-2")


def test_the_lease_s_terms_are_those_that_both_ends_keep_to() -> None:
    terms = LEASE.terms
    assert (terms.ttl, terms.margin) == (LEASE.ttl, LEASE.margin)
    wrong: dict[str, Any] = {**asdict(LEASE), "margin": Seconds(0.9)}
    with pytest.raises(BadInput, match="margin"):
        _ = type(LEASE)(**wrong).terms
