"""The Python API of vmckpt: everything that other programs may use. See docs/api.md.

    import asyncio
    from vmckpt.api import Client

    print(asyncio.run(Client("hosts.yaml").guests()))

All other modules of vmckpt are internal and may change at any time.
"""

from vmckpt.api.client import Client
from vmckpt.api.results import (
    CreatedSnapshot,
    Ended,
    Evacuation,
    EvacuationPlan,
    Finding,
    Forecast,
    Guest,
    Host,
    Migration,
    Move,
    Plan,
    PlannedMove,
    Protected,
    Protection,
    Range,
    Remaining,
    Restored,
    Snapshot,
)
from vmckpt.errors import (
    BadInput,
    Blocked,
    Cancelled,
    CaptureFailed,
    FencingFailed,
    GuestLocked,
    HostUnreachable,
    HypervisorError,
    InventoryError,
    JournalError,
    KeyRefused,
    LeaseLost,
    MigrationFailed,
    NotInStore,
    NotPermitted,
    OutcomeUnknown,
    PolicyError,
    PostcopyPaused,
    ReadOnly,
    RemoteError,
    StoreError,
    TwoCopies,
    VmckptError,
)

API_VERSION = (1, 1)
"""The major version changes if a program that uses the API may have to be changed; the minor
version, if something was added."""

__all__ = [
    "API_VERSION", "BadInput", "Blocked", "Cancelled", "CaptureFailed", "Client",
    "CreatedSnapshot", "Ended", "Evacuation", "EvacuationPlan", "FencingFailed", "Finding",
    "Forecast", "Guest", "GuestLocked", "Host", "HostUnreachable", "HypervisorError",
    "InventoryError", "JournalError", "KeyRefused", "LeaseLost", "Migration", "MigrationFailed",
    "Move", "NotInStore", "NotPermitted", "OutcomeUnknown", "Plan", "PlannedMove", "PolicyError",
    "PostcopyPaused", "Protected", "Protection", "Range", "ReadOnly", "Remaining", "RemoteError",
    "Restored", "Snapshot", "StoreError", "TwoCopies", "VmckptError",
]  # fmt: skip
