"""The `vmckpt-agent` command: reads one order from stdin, carries it out, and exits."""

import sys

from vmckpt import __version__

# The controller asks for the version before each order, so the answer must not wait for imports.
if sys.argv[1:] == ["--version"] and (
    __name__ == "__main__" or sys.argv[0].endswith("/vmckpt-agent")
):
    sys.stdout.write(f"{__version__}\n")
    sys.exit()

import logging
import os
import signal
from importlib import import_module
from pathlib import Path
from typing import Any

from vmckpt.agent import waiting
from vmckpt.agent.protocol import ControllerChannel, error_as_json
from vmckpt.errors import BadInput, VmckptError
from vmckpt.util import host_directories, stop_signals
from vmckpt.util.host_files import FileRefused

log = logging.getLogger("vmckpt.agent")


def main() -> None:
    """Read one order and carry it out. Exits with the status of `carry_out_one`.

    With `--wait KEY SECONDS`, also leaves a process behind that carries out further orders; see
    `waiting`. With `--whole` as well, carries out no order if modules are missing, but reports this
    to the controller.
    """
    if sys.argv[1:2] == ["--wait"]:
        loaded = waiting.load_all()
        if loaded is not None:
            waiting.leave_behind(sys.argv[2], float(sys.argv[3]), loaded, carry_out_one)
        elif "--whole" in sys.argv:
            sys.stdout.write('{"absent":true}\n')
            sys.exit()
        waiting.finish(carry_out_one())
    sys.exit(carry_out_one())


def carry_out_one() -> int:
    """Read one order and carry it out.

    Returns 0 on success, and 1 after sending an error to the controller.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    os.umask(0o022)  # QEMU needs access to some of our directories; private files set their mode
    # The controller handles Ctrl-C from the terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = ControllerChannel(sys.stdin, sys.stdout)
    stop_signals.set_on((signal.SIGTERM, signal.SIGHUP), channel.stop)
    try:
        done = _carry_out(channel)
    except VmckptError as exc:
        channel.send(error=error_as_json(exc))
        return 1
    # The controller must receive any error; context managers have undone the changes by now.
    except Exception as exc:
        log.exception("the order failed")
        if not isinstance(exc, OSError):
            failed = VmckptError(f"unexpected error: {type(exc).__name__}: {exc}")
        else:
            where = f"{exc.filename}: " if exc.filename else ""
            hint = exc.hint if isinstance(exc, FileRefused) else None
            failed = VmckptError(f"{where}{exc.strerror or exc}", hint=hint)
        failed.__cause__ = exc
        channel.send(error=error_as_json(failed))
        return 1
    channel.send(done=done)
    return 0


ORDERS = {
    "cards": ("orders:CardsOrder", "network_cards:carry_out"),
    "count-writes": ("orders:CountOrder", "written_pages:count"),
    "create": ("orders:CreateOrder", "snapshot.create:create"),
    "discard": ("cleanup_orders:DiscardOrder", "restore.files:discard"),
    "drop-forks": ("fork_orders:DropForksOrder", "restore.family:drop"),
    "families": ("fork_orders:FamiliesOrder", "restore.family:families"),
    "finish-lazy": ("cleanup_orders:FinishOrder", "restore.lazy:finish"),
    "fork": ("fork_orders:ForkOrder", "restore.family:fork"),
    "keep-fork": ("fork_orders:KeepForkOrder", "restore.family:keep"),
    "line": ("orders:LineOrder", "snapshot.transfer_parent_state:move"),
    "put-back": ("orders:PutBackOrder", "snapshot.undo_create:put_back"),
    "replica": ("orders:ReplicaOrder", "replication.orders:carry_out"),
    "restore": ("orders:RestoreOrder", "restore.restore:restore"),
    "restore-lazy": ("orders:RestoreOrder", "restore.lazy:restore_lazily"),
    "serve-family": ("fork_orders:ForkOrder", "restore.family_server:serve"),
    "serve": ("orders:RestoreOrder", "restore.lazy_server:serve"),
    "unrestore": ("orders:UnrestoreOrder", "restore.undo_restore:unrestore"),
}
"""For each kind of order, the class that parses it and the function that carries it out.

Both are imported by name, so that an order loads only the modules that it needs."""


def named(name: str) -> Any:
    """Import and return the object `MODULE:NAME`. MODULE is relative to `vmckpt.agent`."""
    module, _, what = name.partition(":")
    return getattr(import_module(f"vmckpt.agent.{module}"), what)


def _carry_out(channel: ControllerChannel) -> dict[str, Any]:
    try:
        told = channel.order()
        kind = str(told.get("do"))
        if kind not in ORDERS:
            host = told.get("host") or "the host"
            raise BadInput(f"unknown order {kind!r}", hint=f"update vmckpt on {host}")
        parse, do = (named(name) for name in ORDERS[kind])
        order = parse.from_json(told)
    except (ValueError, TypeError, KeyError, AttributeError, EOFError) as exc:
        raise BadInput(f"invalid order: {exc}") from exc
    if state := getattr(order, "state", ""):
        host_directories.check_state(Path(state))
    return dict(do(order, channel))


if __name__ == "__main__":
    main()
