"""Both ends of a migration by epochs, as their agents answer for them; no host and no QEMU."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.model.host import Host
from vmckpt.protection.agent_status import ProtectionStatus, parse_answer
from vmckpt.protection.migration.finish import Pair

ALPHA = Host(name="alpha", uri="qemu+tcp://alpha/system")
BETA = Host(name="beta", uri="qemu+tcp://beta/system")
UUID, SESSION = "u-1", "5e55"
PAIR = Pair(guest="web1", uuid=UUID, source=ALPHA, target=BETA, session=SESSION)
COST = {"pause_s": 0.02, "busy_s": 0.05}


@dataclass
class Source:
    """The guest's host."""

    role: bool = True
    """It knows of the migration."""
    qemu: bool = True
    agent: bool = True
    given: bool = False
    defined: bool = False
    outcome: str | None = None
    phase: str = "protecting"
    recent: list[dict[str, float]] = field(default_factory=lambda: [COST] * 3)
    wished: bool = False

    @property
    def runs(self) -> bool:
        """The guest, not only its QEMU."""
        return self.qemu and not self.given


@dataclass
class Target:
    """The standby's host."""

    role: bool = True
    qemu: bool = True
    agent: bool = True
    final: bool = False
    """The last epoch committed was the last one."""
    loads: bool = True
    """The standby takes what it is given."""
    ran: bool = False
    settled: bool = False

    @property
    def runs(self) -> bool:
        return self.qemu and self.ran

    def take_over(self) -> None:
        if self.final and self.agent and self.qemu and not self.ran:
            self.ran = self.loads
            self.agent = self.qemu = self.loads


class Hosts:
    """What both say and do. `silent`: hosts that do not answer."""

    def __init__(self) -> None:
        self.source, self.target = Source(), Target()
        self.silent: set[str] = set()
        self.delivers = True
        """The source's word reaches the target."""
        self.switches = True
        """What is asked for is done."""
        self.did: list[str] = []
        self.asked = 0

    @property
    def running(self) -> list[str]:
        ends = {"alpha": self.source.runs, "beta": self.target.runs}
        return [name for name, runs in ends.items() if runs]

    @property
    def left(self) -> list[str]:
        """Hosts on which anything of the migration is left."""
        known = {"alpha": self.source.role, "beta": self.target.role}
        found = [name for name, knows in known.items() if knows]
        if self.target.qemu and not self.target.ran:
            found.append("a standby")
        if self.source.qemu and self.source.given:
            found.append("a copy that was given away")
        return found

    async def order(self, host: Host, guest: str, what: str, **more: Any) -> dict[str, Any]:
        assert guest == UUID
        if host.name in self.silent:
            raise RemoteError(f"{host.name}: no answer")
        ours = host.name == "alpha"
        if wish := more.get("wish"):
            self.did.append(f"{host.name} {wish}")
            (self._planned if ours else self.target.take_over)()
        if what == "end":
            assert more["owner"] == SESSION
            self.did.append(f"{host.name} end")
            return self._end_source(more) if ours else self._end_target()
        return self._source() if ours else self._target()

    async def status(self, host: Host, guest: str) -> ProtectionStatus:
        self.asked += 1
        try:
            return parse_answer(await self.order(host, guest, "ask"))
        except RemoteError as exc:
            return parse_answer({"error": str(exc), "unreachable": True})

    async def both(self, hosts: Mapping[str, Host], guest: str) -> dict[str, ProtectionStatus]:
        told = {name: await self.status(host, guest) for name, host in hosts.items()}
        return {name: one for name, one in told.items() if not one.knows_nothing}

    def _planned(self) -> None:
        self.source.wished = True
        if self.switches:
            self.give()

    def give(self) -> None:
        """The last epoch has come, and the source says so, or dies in the attempt."""
        self.target.final = True
        self.source.given = True
        if self.delivers:
            self.target.take_over()

    def _source(self) -> dict[str, Any]:
        one = self.source
        if not one.role:
            return {"role": None, "runs": one.qemu}
        told: dict[str, Any] = {
            "role": "primary", "session": SESSION, "runs": one.qemu, "agent": one.agent,
            "phase": one.phase, "recent": one.recent, "wished": one.wished, "epoch": 3,
            "sent": 1 << 20, "interval_s": 0.2, "last": {"pages": 10, "bytes": 4096},
        }  # fmt: skip
        if one.outcome is not None:
            told |= {"outcome": one.outcome, "why": "the guest's QEMU died", "agent": False}
        return told | ({"given": {"stood_s": 0.08}} if one.given else {})

    def _target(self) -> dict[str, Any]:
        one = self.target
        if not one.role:
            return {"role": None, "runs": one.qemu}
        told: dict[str, Any] = {
            "role": "backup", "session": SESSION, "runs": one.qemu, "agent": one.agent,
        }  # fmt: skip
        if one.ran:
            told |= {"outcome": "failed-over", "why": "handed over", "took_s": 0.02, "ran": True}
        return told

    def _end_source(self, more: Mapping[str, Any]) -> dict[str, Any]:
        one, define = self.source, more.get("define", True)
        if not one.role:
            return {"did": []}
        one.agent = False
        if define and more.get("standby_gone"):
            one.given = False
        if one.given and define:
            return {"did": [], "given": True}
        one.qemu = one.qemu and not one.given
        one.role, one.defined = False, define
        return {"did": ["ended its mirrors"]}

    def _end_target(self) -> dict[str, Any]:
        one = self.target
        if not one.role:
            return {"did": []}
        one.role = one.agent = False
        one.settled = one.ran
        one.qemu = one.qemu and one.ran
        return {"did": ["stopped the standby"]}
