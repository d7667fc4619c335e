"""Reasons of servers in a snapshot's pin."""

from pathlib import Path

from tests.support.storing import chunks, new_store, write
from vmckpt.agent.restore import pins

ID = "s-aaaaaaaaaaaaaaaa"


def test_a_familys_reason_is_added_and_removed_beside_others(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, ID, chunks(1, 2))
    one = f"guest g1 {pins.READS} alpha"
    two = f"forks of web1 {pins.READS} alpha (family f-1)"
    pins.pin(store, ID, one)
    pins.pin(store, ID, two)
    pins.pin(store, ID, two)
    assert store.pin_reason(ID) == f"{one}; {two}"
    pins.unpin(store, ID, {one})
    assert store.pin_reason(ID) == two
    pins.unpin(store, ID, {two})
    assert store.pin_reason(ID) is None


def test_an_operators_pin_is_left_alone(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    write(store, ID, chunks(1, 2))
    store.pin(ID, "until the audit is over")
    pins.pin(store, ID, f"forks of web1 {pins.READS} alpha (family f-1)")
    assert store.pin_reason(ID) == "until the audit is over"
