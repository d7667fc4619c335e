"""The program `vmckpt-agent`: takes one order on stdin, carries it out, and ends."""

import sys

from vmckpt import __version__

# Asked before each order, so it must not wait for all that an order needs.
if sys.argv[1:] == ["--version"] and (
    __name__ == "__main__" or sys.argv[0].endswith("/vmckpt-agent")
):
    sys.stdout.write(f"{__version__}\n")
    sys.exit()

import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any

from vmckpt.agent import (
    create,
    discard,
    lazy,
    lines,
    putback,
    restore,
    serving,
    unrestore,
)
from vmckpt.agent.afterwards import DiscardOrder, FinishOrder
from vmckpt.agent.lines import LineOrder
from vmckpt.agent.orders import (
    CreateOrder,
    PutBackOrder,
    ReplicaOrder,
    RestoreOrder,
    UnrestoreOrder,
)
from vmckpt.agent.talk import Talk, error_as_json
from vmckpt.errors import BadInput, VmckptError

log = logging.getLogger("vmckpt.agent")


def main() -> None:
    """Exit status 0 when the order was carried out, 1 when it was told why not."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    # The terminal's Ctrl-C is the controller's to handle.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    talk = Talk(sys.stdin, sys.stdout)
    signal.signal(signal.SIGTERM, lambda *_: talk.stop.set())
    signal.signal(signal.SIGHUP, lambda *_: talk.stop.set())
    try:
        done = _carry_out(talk)
    except VmckptError as exc:
        talk.tell(error=error_as_json(exc))
        sys.exit(1)
    # Whatever it is, the controller must hear of it, and the exits above have undone what was set.
    except Exception as exc:
        log.exception("the order was not carried out")
        if not isinstance(exc, OSError):
            failed = VmckptError(f"unexpected: {type(exc).__name__}: {exc}")
        else:
            where = f"{exc.filename}: " if exc.filename else ""
            failed = VmckptError(f"{where}{exc.strerror or exc}")
        failed.__cause__ = exc
        talk.tell(error=error_as_json(failed))
        sys.exit(1)
    talk.tell(done=done)


def _replica(order: ReplicaOrder, talk: Talk) -> dict[str, Any]:
    # Only those about protections pay for what these need.
    from vmckpt.agent import replicas  # noqa: PLC0415

    return replicas.carry_out(order, talk)


_Parse = Callable[[Mapping[str, Any]], Any]
_Do = Callable[[Any, Talk], dict[str, Any]]
_ORDERS: Mapping[str, tuple[_Parse, _Do]] = {
    "create": (CreateOrder.from_json, create.create),
    "discard": (DiscardOrder.from_json, discard.discard),
    "finish-lazy": (FinishOrder.from_json, lazy.finish),
    "line": (LineOrder.from_json, lines.move),
    "put-back": (PutBackOrder.from_json, lambda order, _: putback.put_back(order)),
    "replica": (ReplicaOrder.from_json, _replica),
    "restore": (RestoreOrder.from_json, restore.restore),
    "restore-lazy": (RestoreOrder.from_json, lazy.restore_lazily),
    "serve": (RestoreOrder.from_json, serving.serve),
    "unrestore": (UnrestoreOrder.from_json, lambda order, _: unrestore.unrestore(order)),
}
"""How each is read and carried out."""


def _carry_out(talk: Talk) -> dict[str, Any]:
    try:
        told = talk.order()
        kind = str(told.get("do"))
        if kind not in _ORDERS:
            raise BadInput(f"an order that is not known: {kind!r}", mend="update vmckpt there")
        parse, do = _ORDERS[kind]
        order = parse(told)
    except (ValueError, TypeError, KeyError, AttributeError, EOFError) as exc:
        raise BadInput(f"no order that can be read: {exc}") from exc
    return do(order, talk)


if __name__ == "__main__":
    main()
