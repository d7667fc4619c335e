"""A scratch guest: it counts until it is paused, and nothing of it is left."""

from pathlib import Path

import pytest

from tests.support.scratch_qemu import PAGES, SIZE, Scratch
from vmckpt.errors import HypervisorError


def left() -> list[str]:
    return [one.name for one in Path("/dev/shm").glob("vmckpt-scratch-*")]


def test_it_counts_in_its_pages_until_it_is_paused() -> None:
    with Scratch(accelerator="tcg") as guest:
        assert guest.run_state() == "running"
        assert guest.goes_on()
        guest.tell("stop", {})
        assert guest.run_state() == "paused"
        assert not guest.goes_on(0.2)
        assert sum(page.any() for page in guest.memory.pages[16 : 16 + PAGES]) > 0
        assert any(one["event"] == "STOP" for one in guest.events)
        assert [one.size for one in guest.files] == [SIZE]
        assert left() == [], "its memory has no name any more"
        process = guest._process
    assert process.returncode is not None


def test_one_that_waits_does_not_begin_by_itself() -> None:
    with Scratch(accelerator="tcg", waits=True) as guest:
        assert guest.run_state() == "inmigrate"
        assert not guest.goes_on(0.1)


def test_what_qemu_refuses_and_its_end_are_errors() -> None:
    with Scratch(accelerator="tcg") as guest:
        with pytest.raises(HypervisorError, match="no-such-command"):
            guest.ask("no-such-command")
        guest._process.kill()
        guest._process.wait()
        with pytest.raises(HypervisorError, match=r"query-status: .*QEMU"):
            guest.ask("query-status")


@pytest.mark.parametrize("more", [{"accelerator": "none-such"}, {"qemu": "/no/such/qemu"}])
def test_a_host_without_that_qemu_or_accelerator_has_none(more: dict[str, str]) -> None:
    with pytest.raises((HypervisorError, OSError)), Scratch(**more):  # type: ignore[arg-type]
        pass
    assert left() == []
