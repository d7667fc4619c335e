"""A lease store on two machines: a PostgreSQL server and its asynchronous replica.

In a failover, the server's machine loses its link, all its processes die, and the lease store's
address moves to the replica. `follow` then creates the next replica on the old machine.
"""

import shutil
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt_lab import network
from vmckpt_lab.faults import inject
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.plan import LabPlan
from vmckpt_lab.shell import in_namespace, run, start_daemon

_AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups")
_LIMIT = 30.0


@dataclass(frozen=True, slots=True)
class _Seat:
    """A machine that PostgreSQL can run on."""

    namespace: str
    link: str
    address: str
    """The machine's own address. The server's machine also has the lease store's address."""
    data: Path


class WitnessPair:
    """A lab's lease store with a replica. Creating a pair restarts PostgreSQL. Raises LabError."""

    def __init__(self, plan: LabPlan, environment: Mapping[str, str] | None = None) -> None:
        """`environment`: additional environment of PostgreSQL."""
        self._plan = plan
        self._environment = [f"{key}={value}" for key, value in (environment or {}).items()]
        self._programs = Path(inject.stop_postgres(plan)[0]).parent
        base = plan.witness_address.rpartition(".")[0]
        first, second = (f"{plan.prefix}witness", f"{plan.prefix}replica")
        self._seats = (
            _Seat(first, plan.link_to("witness"), f"{base}.51", plan.folder / "witness"),
            _Seat(second, plan.link_to("replica"), f"{base}.52", plan.folder / "replica"),
        )
        network.side_room(plan, second, "replica", f"{base}.52/24")
        self._addressed("add", self._seats[0], self._seats[0].address)
        self._serving = 0
        self._start(self._seats[0])
        self.follow()

    @property
    def namespace(self) -> str:
        """Network namespace of the machine on which the server runs."""
        return self._seats[self._serving].namespace

    def follow(self) -> None:
        """Create a replica on the other machine and wait until it has all data. Raises LabError."""
        seat = self._seats[1 - self._serving]
        network.kill_all([seat.namespace])
        run(["ip", "link", "set", seat.link, "up"])
        # The kernel may have removed this address together with the store's address.
        self._addressed("replace", seat, seat.address)
        shutil.rmtree(seat.data, ignore_errors=True)
        seat.data.mkdir(mode=0o700)
        shutil.chown(seat.data, "postgres", "postgres")
        copy = f"{self._programs}/pg_basebackup -h {self._plan.witness_address} -U postgres -R"
        options = f" -D {seat.data} -X stream -c fast --no-sync"
        run(in_namespace(seat.namespace, *_AS_POSTGRES, *(copy + options).split()))
        self._start(seat)
        self.caught_up()

    def caught_up(self) -> None:
        """Wait until the replica has all data of the server. Raises LabError."""
        told = "SELECT coalesce(bool_and(replay_lsn >= pg_current_wal_flush_lsn()), false)"
        told += " FROM pg_stat_replication"
        self._until(lambda: self.sql(told) == "t", "the replica did not catch up in time")

    def hold_back(self) -> None:
        """Stop replication: the replica receives no more commits. Raises LabError."""
        seat = self._seats[self._serving]
        senders = [
            one for one in network.processes_in(seat.namespace) if "walsender" in _title(one)
        ]
        if not senders:
            raise LabError("the lease store's PostgreSQL has no replica")
        for one in senders:
            inject.send(one, signal.SIGSTOP)

    def fail_over(self) -> None:
        """Kill the server's machine and promote the replica. Raises LabError."""
        old, new = self._seats[self._serving], self._seats[1 - self._serving]
        run(["ip", "link", "set", old.link, "down"])
        network.kill_all([old.namespace])
        self._addressed("del", old, self._plan.witness_address)
        promote = f"{self._programs}/pg_ctl promote -w -s -D {new.data}"
        run(in_namespace(new.namespace, *_AS_POSTGRES, *promote.split()))
        self._addressed("add", new, self._plan.witness_address)
        self._serving = 1 - self._serving
        # Clients must resolve the address again, as it now belongs to another machine.
        for one in (None, *(host.namespace for host in self._plan.hosts)):
            where = ["-n", one] if one else []
            run(["ip", *where, "neigh", "flush", "to", self._plan.witness_address], check=False)

    def sql(self, statement: str) -> str:
        """Run a statement with psql. Returns its output; empty if the server does not answer."""
        words = ["-h", self._plan.witness_address, "-U", "postgres", "-X", "-A", "-t", "-c"]
        return run([f"{self._programs}/psql", *words, statement], check=False).strip()

    def _addressed(self, word: str, seat: _Seat, address: str) -> None:
        run(["ip", "-n", seat.namespace, "addr", word, f"{address}/24", "dev", "eth0"])

    def _start(self, seat: _Seat) -> None:
        server = f"{self._programs}/postgres -D {seat.data} -c listen_addresses=*"
        command = [*_AS_POSTGRES, "env", *self._environment, *server.split()]
        command += ["-c", "unix_socket_directories="]
        start_daemon(in_namespace(seat.namespace, *command), self._plan.folder / "witness.log")
        ready = [f"{self._programs}/pg_isready", "-h", seat.address, "-U", "postgres"]
        self._until(
            lambda: "accepting" in run(ready, check=False),
            f"PostgreSQL did not start in time; see {self._plan.folder}/witness.log",
        )

    @staticmethod
    def _until(condition: Callable[[], bool], trouble: str) -> None:
        give_up = Deadline(_LIMIT)
        while not condition():
            if give_up.passed():
                raise LabError(trouble)
            time.sleep(0.05)


def _title(process: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace")
    return ""
