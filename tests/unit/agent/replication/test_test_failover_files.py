"""What a test of a standby has made is found and taken away by what was written down."""

from pathlib import Path

import pytest

from tests.support.replicas import session
from vmckpt.agent.replication import test_failover_files
from vmckpt.agent.replication.test_failover_files import Traces
from vmckpt.errors import BadInput, HypervisorError
from vmckpt.hypervisor import connection


class Nobody:
    """A libvirt that knows of no guest."""

    def __init__(self, guest: str, **_: object) -> None:
        raise HypervisorError(f"no guest {guest}", host="beta", code=connection.NOT_HERE[0])


def test_after_a_crash_all_files_are_found_by_what_was_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_failover_files, "QmpMonitor", Nobody)
    image = tmp_path / "web1-vda-5e55.raw"
    files = [test_failover_files.changed(str(image)), test_failover_files.overlay(str(image))]
    assert len({str(image), *files}) == 3
    for name in (str(image), files[0]):  # the other had not been made yet
        Path(name).touch()
    state = tmp_path / "state"
    Traces(uuid="u-2", name="web1-test", files=tuple(files)).write(state)
    ours = session(role="backup", state=str(state))
    test_failover_files.clear(ours)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["state", "web1-vda-5e55.raw"]
    assert list(state.iterdir()) == []
    test_failover_files.clear(ours)
    assert not test_failover_files.forget_files(state)


def test_without_a_word_of_libvirt_nothing_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def __init__(self, guest: str, **_: object) -> None:
            raise HypervisorError(f"no answer about {guest}", host="beta")

    monkeypatch.setattr(test_failover_files, "QmpMonitor", Silent)
    old = tmp_path / "old"
    old.touch()
    Traces(uuid="u-2", name="web1-test", files=(str(old),)).write(tmp_path / "state")
    with pytest.raises(HypervisorError, match="no answer about u-2"):
        test_failover_files.clear(session(role="backup", state=str(tmp_path / "state")))
    assert old.exists()


@pytest.mark.parametrize("text", ["", "[]", '{"uuid": 1}', "nonsense"])
def test_what_was_written_down_and_makes_no_sense_is_said(tmp_path: Path, text: str) -> None:
    (tmp_path / "test.json").write_text(text)
    with pytest.raises(BadInput, match=r"test\.json is invalid"):
        Traces.read(tmp_path)
