"""A monitor that does as QEMU does in a migration."""

from typing import Any

from vmckpt.capture.migration_settings import Undo
from vmckpt.errors import HypervisorError

UNDO = Undo(
    guest="00000000-0000-0000-0000-000000000000", capabilities={"background-snapshot": False},
    bandwidth=134217728, runs=True, folder="",
)  # fmt: skip


class Qemu:
    """A monitor; `status` is that of the migrations it tells one after the other."""

    guest = UNDO.guest
    host, name, uri = "alpha", "web1", "qemu:///system"

    def __init__(self, *status: str, state: str = "running", paused_by: bool = False) -> None:
        self.status = list(status) or ["none"]
        self.state = state
        self.by_somebody = paused_by
        self.capabilities = {"events": True, "background-snapshot": False, "xbzrle": False}
        self.bandwidth = 134217728
        self.told: list[str] = []

    def ask(self, command: str, **_: object) -> Any:
        if command == "query-migrate":
            status = self.status[0] if len(self.status) == 1 else self.status.pop(0)
            return {} if status == "none" else {"status": status}
        if command == "query-migrate-capabilities":
            return [{"capability": k, "state": v} for k, v in self.capabilities.items()]
        if command == "query-migrate-parameters":
            return {"max-bandwidth": self.bandwidth}
        raise AssertionError(command)

    def tell(self, command: str, arguments: dict[str, Any], *, files: tuple[int, ...] = ()) -> Any:
        self.told.append(command)
        if command == "migrate-set-capabilities":
            for one in arguments["capabilities"]:
                self.capabilities[one["capability"]] = one["state"]
        elif command == "migrate-set-parameters":
            self.bandwidth = arguments["max-bandwidth"]
        elif command == "closefd":
            raise HypervisorError("File descriptor named 'vmckpt' not found", host="alpha")
        elif command in ("cont", "stop"):
            self.state = "running" if command == "cont" else "paused"

    def run_state(self) -> str:
        return self.state

    def paused_by_user(self) -> bool:
        return self.by_somebody
