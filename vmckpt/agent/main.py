"""The program `vmckpt-agent`: takes one order on stdin, carries it out, and ends."""

import logging
import signal
import sys
from typing import Any

from vmckpt.agent import create, putback, restore, unrestore
from vmckpt.agent.orders import CreateOrder, PutBackOrder, RestoreOrder, UnrestoreOrder
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
            talk.tell(error=error_as_json(VmckptError(f"unexpected: {type(exc).__name__}: {exc}")))
            sys.exit(1)
        where = f"{exc.filename}: " if exc.filename else ""
        failed = VmckptError(f"{where}{exc.strerror or exc}")
        talk.tell(error=error_as_json(failed))
        sys.exit(1)
    talk.tell(done=done)


def _carry_out(talk: Talk) -> dict[str, Any]:
    try:
        told = talk.order()
        order: CreateOrder | PutBackOrder | RestoreOrder | UnrestoreOrder
        match told.get("do"):
            case "create":
                order = CreateOrder.from_json(told)
            case "put-back":
                order = PutBackOrder.from_json(told)
            case "restore":
                order = RestoreOrder.from_json(told)
            case "unrestore":
                order = UnrestoreOrder.from_json(told)
            case kind:
                raise BadInput(f"an order that is not known: {kind!r}", mend="update vmckpt there")
    except (ValueError, TypeError, KeyError, AttributeError, EOFError) as exc:
        raise BadInput(f"no order that can be read: {exc}") from exc
    if isinstance(order, CreateOrder):
        return create.create(order, talk)
    if isinstance(order, RestoreOrder):
        return restore.restore(order, talk)
    if isinstance(order, UnrestoreOrder):
        return unrestore.unrestore(order)
    return putback.put_back(order)


if __name__ == "__main__":
    main()
