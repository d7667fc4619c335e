"""The images of a restore that was interrupted, and libvirt's word for its guest."""

from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import pytest

from vmckpt.agent.orders import UnrestoreOrder
from vmckpt.agent.restore import replace_file, undo_restore
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import connection

ID = "s-aaaaaaaaaaaaaaaa"


NEW, OLD = "restored", "before"


class FakeMonitor:
    """libvirt's word for the guest."""

    state: ClassVar[str | None] = None
    name = "web1"

    def __init__(self, guest: str, *, host: str, uri: str) -> None:
        if self.state is None:
            raise HypervisorError("no guest", host=host, code=connection.NOT_HERE[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        pass

    def run_state(self) -> str:
        return str(self.state)


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> UnrestoreOrder:
    """Two disks with images from before, and new ones beside them; the guest is off."""
    monkeypatch.setattr(undo_restore, "QmpMonitor", FakeMonitor)
    monkeypatch.setattr(FakeMonitor, "state", None)
    made = {}
    for name in ("vda", "vdb"):
        (tmp_path / name).write_text(OLD)
        new = replace_file.paths(tmp_path / name, ID)[0]
        new.write_text(NEW)
        made[name] = replace_file.mark(new)
    return UnrestoreOrder(
        guest="u", uri="", host="alpha", state=str(tmp_path / "state"), snapshot=ID,
        images={name: str(tmp_path / name) for name in made}, made=made,
    )  # fmt: skip


def swap(order: UnrestoreOrder, *names: str) -> None:
    for name in names:
        place = Path(order.images[name])
        new, old = replace_file.paths(place, ID)
        place.rename(old)
        new.rename(place)
