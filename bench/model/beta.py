"""The process on the standby's host: the backup's agent."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

from bench.model import fakes
from bench.model.replay import do
from bench.model.world import BETA, TERMS
from vmckpt.replication.backup import lease_claimant, loop
from vmckpt.replication.backup.lease_claimant import LeaseClaim
from vmckpt.replication.backup.loop import Backup
from vmckpt.replication.protocol.connection import ConnectionLost
from vmckpt.replication.protocol.messages import EpochEnd, WireError
from vmckpt.units import Seconds

Told = tuple[Any, ...]
_SESSION = fakes.session(BETA)


class _Claim(LeaseClaim):
    """A real LeaseClaim, whose newest token is in the model."""

    def __init__(self) -> None:
        self._file, self.says, self._host = fakes.FOLDER / "token", "", BETA
        self.patience = Seconds(TERMS.ttl / 4)
        self._client = fakes.Client(BETA, "b")
        self._lock = mock.MagicMock()
        self._next, self._every = 0.0, Seconds(0.1)

    @property
    def token(self) -> int:
        return int(do("read", "token"))

    @token.setter
    def token(self, token: int) -> None:
        do("knows", token)


class _Stage:
    """The epochs on beta's disk and in its memory."""

    applied = True

    def __init__(self, captured: Told = ()) -> None:
        self._captured = captured

    @property
    def committed(self) -> int:
        return int(do("read", "epoch"))

    @property
    def last(self) -> Any:
        return SimpleNamespace(final=do("read", "final"), taken=0.0) if self.committed else None

    def seal(self, seal: EpochEnd) -> int:
        """Commit an epoch. Raises WireError if it is not based on the last committed epoch."""
        if seal.base != self.committed:
            raise WireError("an epoch on another one than the last")
        do("commit", seal.epoch, seal.final, *self._captured)
        return seal.epoch

    def apply(self) -> None:
        pass

    def discard(self) -> None:
        pass

    def start_over(self) -> None:
        do("start over")


def _backup(handed: bool, captured: Told = ()) -> tuple[Backup, _Claim]:
    held = _Claim()
    stage: Any = _Stage(captured)
    requests: Any = SimpleNamespace(has=lambda _: False, drop=lambda _: None)
    one = Backup(
        _SESSION, fakes.FOLDER, stage=stage, standby=mock.MagicMock(), claim=held,
        requests=requests, between=lambda: None,
    )  # fmt: skip
    one._handed_over = handed
    return one, held


def message(handed: bool, told: Told) -> Told:
    """Process a message from the primary."""
    one, held = _backup(handed, told[5:])
    line: Any = fakes.Line("down", lambda: held.token)
    try:
        if not held.takes(told[1]):
            raise WireError("an old token")
        one._take(line, fakes.message_of(told))
    except (ConnectionLost, WireError, ValueError):
        return "cut", one._handed_over
    return "over" if one._over else "taken", one._handed_over


def poll(handed: bool, _: Told) -> Told:
    """Check whether the standby must take over."""
    one, _claim = _backup(handed)
    one._heard = -1000.0  # a long silence, which only determines when to check
    return ("ours" if one._ours() is not None else "not yet"), handed


def run(handed: bool, _: Told) -> Told:
    """Start the guest from the standby."""
    do("start guest")
    return "runs", handed


ENTRIES: dict[str, Callable[..., Any]] = {
    "message": message, "poll": poll, "run": run,
}  # fmt: skip


@contextmanager
def on_fakes() -> Iterator[None]:
    """Let the product's modules work on the model while the block runs."""
    still = SimpleNamespace(monotonic=lambda: 0.0, time=lambda: 0.0)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(lease_claimant, "time", still))
        stack.enter_context(
            mock.patch.object(lease_claimant, "atomic_file", SimpleNamespace(put=fakes.put))
        )
        stack.enter_context(mock.patch.object(loop, "time", still))
        yield
