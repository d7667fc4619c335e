"""One value of each kind that goes between versions, as it is written.

Orders to agents and their errors, messages between agents, what agents write to be undone, and what
the journal and --json keep.
"""

import json
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NewType, Union, get_args, get_origin, get_type_hints

from vmckpt import errors, recovery
from vmckpt.agent import cleanup_orders, orders
from vmckpt.agent.protocol import error_as_json
from vmckpt.capture import fs_freeze, migration_settings, network_hold
from vmckpt.capture.disks import live
from vmckpt.errors import HypervisorError, VmckptError
from vmckpt.journal.serialization import as_record
from vmckpt.migration.recovery import steps as migration_steps
from vmckpt.migration.request import PolicyOverrides
from vmckpt.model import events
from vmckpt.model.finding import Finding
from vmckpt.model.recovery import Settled
from vmckpt.policy.model import Protection
from vmckpt.protection import steps as protection_steps
from vmckpt.replication import session
from vmckpt.replication.protocol import messages
from vmckpt.snapshot import request
from vmckpt.units import Seconds

_AS_JSON = (
    orders.CreateOrder, orders.PutBackOrder, orders.RestoreOrder, orders.UnrestoreOrder,
    orders.ReplicaOrder, orders.CountOrder, orders.CardsOrder, cleanup_orders.FinishOrder,
    cleanup_orders.DiscardOrder, orders.LineOrder, PolicyOverrides, Finding, Protection,
    request.Taken, request.Restored, Settled,
)  # fmt: skip
_TO_JSON = (
    network_hold.HoldUndo, fs_freeze.FsFreezeUndo, migration_settings.Undo, live.DiskUndo,
)  # fmt: skip


def samples(folder: Path) -> dict[str, Any]:
    """All of them, by name; `folder` is written to."""
    made: dict[str, Any] = {kind.__name__: sample(kind, "").as_json() for kind in _AS_JSON}
    made |= {
        f"{kind.__module__.rpartition('.')[2]} {kind.__name__}":
            json.loads(sample(kind, "").to_json())
        for kind in _TO_JSON
    }  # fmt: skip
    for number, form in sorted(messages._FORMS.items()):
        fixed, tail = messages.body(sample(form.made, ""))
        made[f"message {number}"] = (fixed + bytes(tail)).hex()
    made["errors"] = list(_errors())
    sample(session.Session, "").write(folder)
    made["session file"] = json.loads((folder / session._FILE).read_text())
    for kind in get_args(events.Event):
        record = as_record(sample(kind, ""), Seconds(0.0), Seconds(1.0))
        made[f"event {record.kind}"] = [record.at, record.values]
    made["steps"] = [
        [str(one) for one in kind]
        for kind in (migration_steps.Step, protection_steps.Step, request.Step)
    ]
    made["kinds of operations"] = sorted(recovery.HANDLERS)
    told: dict[str, Any] = json.loads(json.dumps(made, default=str))
    return told


def _errors() -> Iterator[dict[str, Any]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, VmckptError):
            how = {"host": "alpha"} if issubclass(kind, HypervisorError) else {}
            yield error_as_json(kind("it broke", hint="do that", **how))


def sample(kind: Any, name: str) -> Any:
    """A value of a type that tells the name of the field where it is."""
    if isinstance(kind, NewType):
        return kind(sample(kind.__supertype__, name))
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return sample(next(one for one in inner if one is not types.NoneType), name)
    if origin in (tuple, list, Sequence, Collection):
        return tuple(sample(one, name) for one in inner if one is not Ellipsis)
    if origin in (dict, Mapping):
        return {sample(inner[0], f"{name}'s key"): sample(inner[1], name)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if is_dataclass(kind) and isinstance(kind, type):
        hints = get_type_hints(kind)
        names = [one.name for one in fields(kind) if one.init]
        return kind(**{one: sample(hints[one], one) for one in names})
    plain = {
        str: name, int: len(name), float: len(name) + 0.5, bool: True, object: name, Any: name,
        bytes: name.encode().ljust(16, b".")[:16],
    }  # fmt: skip
    return plain[kind]
