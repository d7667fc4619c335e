"""The guest agent: is it there, and let it hold the guest's file systems still and go on.

An order that was not answered in time may still be carried out: after every freeze, also one that
failed, comes a thaw.
"""

import json
from collections.abc import Callable
from typing import Any, TypeVar

import libvirt
import libvirt_qemu

from vmckpt.errors import HypervisorError
from vmckpt.hypervisor import domain_xml
from vmckpt.hypervisor.qmp import DomainCaller
from vmckpt.units import Seconds

T = TypeVar("T")

_NONE = (
    libvirt.VIR_ERR_ARGUMENT_UNSUPPORTED,  # the guest has no channel for one
    libvirt.VIR_ERR_AGENT_UNRESPONSIVE,
    libvirt.VIR_ERR_OPERATION_INVALID,  # the guest does not run
)
_SHORT = Seconds(5.0)
_NANO = 1_000_000_000


class GuestAgent:
    """The agent in one guest. Limits are libvirt's, in whole seconds."""

    def __init__(self, caller: DomainCaller) -> None:
        self._seat = caller

    def there(self, *, limit: Seconds = _SHORT) -> bool:
        """Whether it answers."""
        try:
            self._ask("guest-ping", limit, str)
        except HypervisorError as exc:
            if exc.code in _NONE:
                return False
            raise
        except libvirt.libvirtError as exc:  # where the calls are made in a connection's thread
            if exc.get_error_code() in _NONE:
                return False
            raise
        return True

    def frozen(self, *, limit: Seconds = _SHORT) -> bool:
        """Whether file systems are held still. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-status", limit, _text) == "frozen"

    def freeze(self, *, limit: Seconds) -> int:
        """Hold file systems still; how many. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-freeze", limit, _number)

    def thaw(self, *, limit: Seconds = _SHORT) -> int:
        """Let them go on; how many were held. Raises HypervisorError."""
        return self._ask("guest-fsfreeze-thaw", limit, _number)

    def time(self, *, limit: Seconds = _SHORT) -> Seconds:
        """Its clock, since 1970. Raises HypervisorError."""
        return Seconds(self._ask("guest-get-time", limit, _number) / _NANO)

    def set_time(self, to: Seconds, *, limit: Seconds = _SHORT) -> None:
        """Set its clock, since 1970. Raises HypervisorError."""
        self._ask("guest-set-time", limit, _nothing, time=round(to * _NANO))

    def _ask(
        self, command: str, limit: Seconds, read: Callable[[Any], T], **arguments: object
    ) -> T:
        told = {"execute": command, **({"arguments": arguments} if arguments else {})}
        order, seconds = json.dumps(told), max(1, round(limit))

        def call(domain: libvirt.virDomain) -> str:
            return libvirt_qemu.qemuAgentCommand(domain, order, seconds, 0)

        # Asking is not counted as a change: an order without an answer is no riddle, it is undone.
        answer = self._seat.on_domain(command, call)
        try:
            return read(json.loads(answer)["return"])
        except (ValueError, TypeError, LookupError) as exc:
            host = self._seat.host
            text = f"{host}: {command}: the guest agent's answer makes no sense: {answer[:80]!r}"
            raise HypervisorError(text, host=host) from exc


def _text(told: Any) -> str:
    return domain_xml.text(told, "the status")


def _number(told: Any) -> int:
    return domain_xml.count(told, "the number of what was asked for")


def _nothing(_: Any) -> None:
    return


def thaw_left(agent: GuestAgent) -> bool:
    """Let a guest go on whose file systems a dead capture holds still; whether it did.

    For recovery; fine if there is no agent or nothing is held. Raises HypervisorError.
    """
    if not agent.there() or not agent.frozen():
        return False
    agent.thaw()
    return True
