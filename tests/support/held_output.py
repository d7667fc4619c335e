"""A guest whose output is held: its cards, and a monitor that has their filters."""

from typing import Any

from vmckpt.capture.network_hold import HoldUndo
from vmckpt.errors import HypervisorError
from vmckpt.hypervisor.qmp import QmpRefused

UNDO = HoldUndo(
    guest="00000000-0000-0000-0000-000000000000", cards=("net0", "net1"), runs=True
)  # fmt: skip


def xml(*devices: str) -> str:
    return f"<domain><name>web1</name><devices>{''.join(devices)}</devices></domain>"


def card(kind: str = "bridge", model: str = "virtio", driver: str = "", name: str = "net0") -> str:
    return (
        f"<interface type='{kind}'><model type='{model}'/>{driver}<alias name='{name}'/>"
        "</interface>"
    )


class Qemu:
    """A monitor of a guest with filters."""

    guest = UNDO.guest
    host, name, uri = "alpha", "web1", "test:///default"

    def __init__(self, *devices: str, state: str = "running", refuses: str = "") -> None:
        self.filters: dict[str, dict[str, Any]] = {}
        self.devices, self.state, self.refuses = devices, state, refuses
        self.migration = "none"
        self.by_somebody = self.dead = False
        self.told: list[str] = []

    def described(self) -> str:
        return xml(*self.devices)

    def ask(self, command: str, **_: object) -> Any:
        assert command == "query-migrate"
        return {"status": self.migration}

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        self.told.append(command)
        if self.dead:
            raise HypervisorError("alpha: object-del: no answer", host="alpha")
        if command == "cont":
            self.state = "running"
        elif command == "object-add":
            if arguments["netdev"] == self.refuses:
                raise QmpRefused("alpha: object-add: vhost is not supported", host="alpha")
            self.filters[arguments["id"]] = arguments
        elif self.filters.pop(arguments["id"], None) is None:
            raise QmpRefused(
                f"alpha: object-del: object '{arguments['id']}' not found", host="alpha"
            )

    def run_state(self) -> str:
        return self.state

    def paused_by_user(self) -> bool:
        return self.by_somebody
