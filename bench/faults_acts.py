"""Inject the fault of a round. Each fault is injected at once, and records what it struck."""

import re
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from bench.faults_plan import ENDS, How, Kind, Round, Victim
from bench.faults_scene import GUEST, HOSTS, Scene, go_on
from vmckpt.errors import LabError
from vmckpt_lab import host, network
from vmckpt_lab.faults import inject
from vmckpt_lab.plan import GUEST_BRIDGE
from vmckpt_lab.shell import run

FROZEN = 6.0
_RESTARTED = 1.5
"""Seconds after which a killed libvirtd is restarted, as by a service manager."""
_MAC = re.compile(r"mac address='(\S+?)'")


@dataclass
class Strike:
    """The fault of a round. `at`: the host of the step. `stopped`: the process at the step."""

    scene: Scene
    round: Round
    primary: str
    backup: str
    at: str
    stopped: int | None
    struck: list[str] = field(default_factory=list)
    _later: list[threading.Thread] = field(default_factory=list)

    def __call__(self) -> None:
        """Inject the fault, and resume the process at the step unless it is a victim.

        Raises LabError.
        """
        {
            Kind.SIGNALS: self._signals,
            Kind.ONE_WAY: self._one_way,
            Kind.CLOCK: self._clock,
            Kind.LOST_COMMIT: self._lost_commit,
            Kind.CARD: self._card,
            Kind.HOST: self._host,
        }[self.round.kind]()
        if self.stopped is not None and not self._keeps(self.stopped):
            inject.send(self.stopped, signal.SIGCONT)

    def over(self) -> None:
        """Cancel the delayed parts of the fault, and wait for those that have begun."""
        for one in self._later:
            if isinstance(one, threading.Timer):
                one.cancel()
            one.join()

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, work)
        timer.daemon = True
        timer.start()
        self._later.append(timer)

    def _keeps(self, process: int) -> bool:
        how = self.round.how
        return how in (How.STOP, How.STOP_FOR_GOOD) and process in self._victims()

    def _victims(self) -> list[int]:
        order = self.round.place.order
        found = []
        for one in self.round.victims:
            found += self.scene.victims(self.at, one, order=order)
        return found

    def _signals(self) -> None:
        number = signal.SIGKILL if self.round.how is How.KILL else signal.SIGSTOP
        order = self.round.place.order
        found = {one: self.scene.victims(self.at, one, order=order) for one in self.round.victims}
        for processes in found.values():
            for process in processes:
                inject.send(process, number)
        self.struck = [f"{one}: {len(processes)}" for one, processes in found.items()]
        if self.round.how is How.STOP:
            self._after(self.round.seconds, lambda: go_on(self.scene, self.at))
        elif Victim.LIBVIRTD in self.round.victims and self.round.how is How.KILL:
            self._after(_RESTARTED, lambda: inject.start_libvirtd(self.scene.plan, self.at))

    def _one_way(self) -> None:
        assert self.round.link is not None
        from_, to = self.round.link
        self.mute(from_, to)
        self.struck = [f"{from_} to {to}"]
        if self.round.seconds:
            space = self._namespace(from_)
            self._after(self.round.seconds, lambda: network.unmute(space))

    def mute(self, from_: str, to: str) -> None:
        """Drop all packets from one machine to another."""
        network.mute(self._namespace(from_), self._address(to))

    def _namespace(self, part: str) -> str:
        if part == "witness":
            return self.scene.pair.namespace
        return self.scene.plan.host(
            {"primary": self.primary, "backup": self.backup}[part]
        ).namespace

    def _address(self, part: str) -> str:
        plan = self.scene.plan
        if part == "witness":
            return plan.witness_address
        return plan.host({"primary": self.primary, "backup": self.backup}[part]).address

    def _clock(self) -> None:
        hosts = {"primary": self.primary, "backup": self.backup}
        chosen = str(self.round.clock)
        if chosen in hosts:
            self.scene.jump(hosts[chosen], self.round.jump)
        else:
            self.scene.clock.jump(self.round.jump)
        self.struck = [chosen]

    def _lost_commit(self) -> None:
        """Fail the lease store over. Commits since the replica was held back are lost."""
        self.scene.pair.fail_over()
        if self.round.victims:
            self._signals()
        self.struck.append("lease store")

    def _card(self) -> None:
        words = attach() if self.round.plugs else detach(cards(self.scene, self.primary)[-1])
        # A thread, because libvirt may have to wait for the stopped agent.
        command = host.enter(self.scene.plan.host(self.primary), *words)
        thread = threading.Thread(target=lambda: run(command, check=False), daemon=True)
        thread.start()
        self._later.append(thread)
        time.sleep(0.05)
        self.struck = [words[2]]

    def _host(self) -> None:
        HOST_INJURIES[str(self.round.injury)](self.scene, self.primary)
        self.struck = [str(self.round.injury)]


def cards(scene: Scene, on: str) -> list[str]:
    """Return the MAC addresses of the guest's network cards, in order."""
    told = run(host.enter(scene.plan.host(on), "virsh", "-q", "dumpxml", GUEST), check=False)
    return _MAC.findall(told)


def attach() -> list[str]:
    """Return the command that plugs in another network card."""
    bridge = ["attach-interface", GUEST, "bridge", GUEST_BRIDGE]
    return ["virsh", "-q", *bridge, "--model", "virtio", "--live"]


def detach(address: str) -> list[str]:
    """Return the command that unplugs the card with this MAC address."""
    return ["virsh", "-q", "detach-interface", GUEST, "bridge", "--mac", address, "--live"]


def end(scene: Scene, on: str, how: str) -> None:
    """Kill the guest, or the agent and watchdog, so that the standby takes over."""
    if how == ENDS[0]:
        doomed = scene.qemus(on)
    else:
        doomed = [
            process for one in (Victim.WATCHDOG, Victim.AGENT)
            for process in scene.victims(on, one)
        ]  # fmt: skip
    if not doomed:
        raise LabError(f"nothing to kill on {on}")
    for process in doomed:
        inject.kill(process)


def _freeze(scene: Scene, name: str) -> None:
    """Stop every process of the host, and resume all of them after `FROZEN` seconds."""
    first = scene.first(name)
    for one in scene.processes(name):
        if one != first:
            inject.send(one, signal.SIGSTOP)
    time.sleep(FROZEN)
    go_on(scene, name)


HOST_INJURIES: Mapping[str, Callable[[Scene, str], None]] = {
    "power": lambda scene, name: host.power_off(scene.plan.host(name)),
    "cables": lambda scene, name: network.cut(scene.plan, name, guests_too=True),
    "frozen": _freeze,
    "QEMU killed": lambda scene, name: end(scene, name, ENDS[0]),
}


def other(name: str) -> str:
    """Return the other of the two hosts."""
    return HOSTS[1 - HOSTS.index(name)]
