"""What an agent is told of a restore, and a controller that it says nothing to."""

import io
from pathlib import Path

from vmckpt.agent.orders import RestoreOrder
from vmckpt.agent.protocol import ControllerChannel
from vmckpt.model.disk import StorePlace

ID = "s-aaaaaaaaaaaaaaaa"


def order(folder: Path) -> RestoreOrder:
    return RestoreOrder(
        guest="u-1", uri="", host="alpha", store=StorePlace(name="near", url="/x"), state="/x",
        snapshot=ID, data_key="00" * 32, trusted=(), xml=None,
        images={"vda": str(folder / "vda.qcow2")}, replace=True, links_down=False, paused=False,
    )  # fmt: skip


def channel() -> ControllerChannel:
    return ControllerChannel(io.StringIO(), io.StringIO())
