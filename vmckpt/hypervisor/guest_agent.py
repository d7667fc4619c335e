"""Calls to the QEMU guest agent: freezing of file systems, the clock, the network, commands.

A command that was not answered in time may still be executed later. So every freeze must be
followed by a thaw, even if the freeze failed.
"""

import base64
import ipaddress
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import libvirt
import libvirt_qemu

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.qmp import DomainCaller, QmpMonitor
from vmckpt.model.guest import GuestInterface
from vmckpt.units import Seconds

T = TypeVar("T")

_NONE = (
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,  # the guest has no channel for an agent
    libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
    libvirt.VIR_ERR_OPERATION_INVALID,  # the guest is not running
)
CHANNEL = "org.qemu.guest_agent.0"
"""Name of the guest agent's channel in a definition."""
_SHORT = Seconds(5.0)
_BRIEF = Seconds(2.0)
_NANO = 1_000_000_000
_TURN = Seconds(0.1)
_MOST, _LONGEST = 256, 200
"""Limits for answers: entries of a list, and characters of a text."""


class GuestAgent:
    """The guest agent of one guest. `limit` of a call is rounded to whole seconds, at least 1."""

    def __init__(self, caller: DomainCaller) -> None:
        self._seat = caller

    def there(self, *, limit: Seconds = _SHORT) -> bool:
        """Return whether the agent answers. Raises HypervisorError for other failures."""
        try:
            self._ask("guest-ping", limit, str)
        except HypervisorError as exc:
            if exc.code in _NONE:
                return False
            raise
        except libvirt.libvirtError as exc:  # from a caller that does not map errors
            if exc.get_error_code() in _NONE:
                return False
            raise
        return True

    def frozen(self, *, limit: Seconds = _SHORT) -> bool:
        """Return whether the guest's file systems are frozen. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-status", limit, _text) == "frozen"

    def freeze(self, *, limit: Seconds) -> int:
        """Freeze the guest's file systems. Returns their number. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-freeze", limit, _number)

    def thaw(self, *, limit: Seconds = _SHORT) -> int:
        """Thaw the guest's file systems. Returns their number. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-thaw", limit, _number)

    def time(self, *, limit: Seconds = _SHORT) -> Seconds:
        """Return the guest's clock, in seconds since 1970. Raises HypervisorError."""
        return Seconds(self._ask("guest-get-time", limit, _number) / _NANO)

    def set_time(self, to: Seconds, *, limit: Seconds = _SHORT) -> None:
        """Set the guest's clock, in seconds since 1970. Raises HypervisorError."""
        self._ask("guest-set-time", limit, _nothing, time=round(to * _NANO))

    def interfaces(self, *, limit: Seconds = _SHORT) -> tuple[GuestInterface, ...]:
        """Return the guest's network interfaces. Raises HypervisorError.

        Loopback and link-local addresses are left out.
        """
        return self._ask("guest-network-get-interfaces", limit, _interfaces)

    def execute(
        self, path: str, *words: str, limit: Seconds, stdin: bytes = b""
    ) -> tuple[int, str]:
        """Run a program in the guest. Returns its exit status and its error output.

        The exit status is -1 if a signal ended the program. The output is one line of at most 200
        characters. Raises HypervisorError if the agent cannot run programs, or if the program does
        not exit within `limit`; the program may then still run.
        """
        give_up = time.monotonic() + limit
        more: dict[str, object] = {"capture-output": True}
        if stdin:
            more["input-data"] = base64.b64encode(stdin).decode()
        pid = self._ask("guest-exec", limit, _pid, path=path, arg=list(words), **more)
        while time.monotonic() < give_up:
            done = self._ask("guest-exec-status", limit, _exit, pid=pid)
            if done is not None:
                return done
            time.sleep(_TURN)
        host = self._seat.host
        raise HypervisorError(f"{host}: {path} did not exit in the guest in time", host=host)

    def _ask(
        self, command: str, limit: Seconds, read: Callable[[Any], T], **arguments: object
    ) -> T:
        told = {"execute": command, **({"arguments": arguments} if arguments else {})}
        order, seconds = json.dumps(told), max(1, round(limit))

        def call(domain: libvirt.virDomain) -> str:
            return libvirt_qemu.qemuAgentCommand(domain, order, seconds, 0)

        # Not `changes`: a lost answer needs no OutcomeUnknown, as callers undo the command anyway.
        answer = self._seat.on_domain(command, call)
        try:
            return read(json.loads(answer)["return"])
        except (ValueError, TypeError, LookupError, AttributeError) as exc:
            host = self._seat.host
            text = f"{host}: {command}: invalid answer from the guest agent: {answer[:80]!r}"
            raise HypervisorError(text, host=host) from exc


def _text(told: Any) -> str:
    return domain_xml.text(told, "the status")


def _number(told: Any) -> int:
    return domain_xml.count(told, "the returned number")


def _nothing(_: Any) -> None:
    return


def _pid(told: Any) -> int:
    return domain_xml.count(told["pid"], "the process ID")


def _exit(told: Any) -> tuple[int, str] | None:
    if not told["exited"]:
        return None
    status = told.get("exitcode", -1)
    said = base64.b64decode(str(told.get("err-data", ""))[:4096]).decode(errors="replace")
    return int(status), _printable(" ".join(said.split()))


def _interfaces(told: Any) -> tuple[GuestInterface, ...]:
    return tuple(
        GuestInterface(
            _printable(str(one["name"])),
            str(one.get("hardware-address", ""))[:17].lower(),
            tuple(_addresses(one.get("ip-addresses", ()))),
        )
        for one in told[:_MOST]
    )


def _addresses(told: Any) -> Iterator[str]:
    for one in told[:_MOST]:
        address = ipaddress.ip_address(str(one["ip-address"]).partition("%")[0])
        if not address.is_link_local and not address.is_loopback:
            yield f"{address}/{int(one.get('prefix', 0))}"


def _printable(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)[:_LONGEST]


def answers(monitor: QmpMonitor, definition: str) -> bool:
    """Return whether the agent of a running guest answers; False if it cannot be queried."""
    try:
        runs = CHANNEL in definition and monitor.run_state() == "running"
        return runs and GuestAgent(monitor).there(limit=_BRIEF)
    except HypervisorError:
        return False


def thaw_left(agent: GuestAgent) -> bool:
    """Thaw file systems that an interrupted capture left frozen. Returns whether any were frozen.

    For recovery. Does nothing if the guest has no guest agent. Raises HypervisorError.
    """
    if not agent.there() or not agent.frozen():
        return False
    agent.thaw()
    return True
