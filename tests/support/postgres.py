"""A real PostgreSQL server for tests and benchmarks, with fsync; it leaves nothing behind."""

import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from vmckpt_lab.machine_speed import Deadline

_PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))


def _as_postgres() -> list[str]:
    """PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return []
    drop = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    return [*drop, "--pdeathsig=INT"]


class Server:
    """Listens on a socket in a folder of its own, and on no port."""

    def __init__(self, *, follows: "Server | None" = None, name: str = "", slot: str = "") -> None:
        """`follows`: it becomes a replica of that one, of that application_name and slot."""
        assert _PROGRAMS, "PostgreSQL is not installed; ./check --install does that"
        self._numbers = itertools.count(1)
        self._folder = Path(tempfile.mkdtemp(prefix="vmckpt-pg-"))
        self._server: subprocess.Popen[bytes] | None = None
        if os.geteuid() == 0:
            shutil.chown(self._folder, "postgres", "postgres")
        make = ["initdb", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--no-sync"]
        if follows is not None:
            primary = f"host={follows._folder} user=postgres application_name={name}"
            make = ["pg_basebackup", "-d", primary, "-R", "--checkpoint=fast", "--no-sync"]
            make += ["--create-slot", f"--slot={slot}"] if slot else []
        try:
            self._run(f"{_PROGRAMS[-1]}/{make[0]}", *make[1:], "-D", str(self._folder / "data"))
            self.start()
        except BaseException:
            self.remove()
            raise

    def start(self) -> None:
        server = [f"{_PROGRAMS[-1]}/postgres", "-D", f"{self._folder}/data", "-h", ""]
        server += ["-k", str(self._folder), "-c", "shared_buffers=16MB"]
        # Of one that is killed nothing is to stay in /dev/shm.
        server += ["-c", "dynamic_shared_memory_type=mmap"]
        with (self._folder / "log").open("ab") as log:
            self._server = subprocess.Popen(
                [*_as_postgres(), *server],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                cwd="/", start_new_session=True,
            )  # fmt: skip
        ready = [f"{_PROGRAMS[-1]}/pg_isready", "-q", "-h", str(self._folder)]
        until = Deadline(30)
        while subprocess.run(ready, check=False).returncode != 0:
            if self._server.poll() is not None or until.passed():
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.05)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: in good order; SIGQUIT: like a crash."""
        if self._server is not None:
            self._server.send_signal(how)
            self._server.wait(30)
            self._server = None

    def remove(self) -> None:
        self.stop(signal.SIGQUIT)  # nobody needs what it would still write
        shutil.rmtree(self._folder)

    def place(self, **options: str) -> str:
        """The URL of a new, empty journal; `options` are the session's settings."""
        name = f"journal{next(self._numbers)}"
        self.sql(f"CREATE SCHEMA {name}")
        return self.url(search_path=name, **options)

    def url(self, **options: str) -> str:
        settings = quote(" ".join(f"-c {key}={value}" for key, value in options.items()))
        return f"postgresql://postgres@/postgres?host={self._folder}&options={settings}"

    def sql(self, statement: str, schema: str = "public") -> str:
        """What psql says to a statement."""
        psql = [f"{_PROGRAMS[-1]}/psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1"]
        psql += ["-h", str(self._folder), "-U", "postgres"]
        return self._run(*psql, "-c", f"SET search_path = {schema}", "-c", statement).strip()

    def reload(self) -> None:
        """Have it read its configuration anew, and wait until it has."""
        before = self.sql("SELECT pg_conf_load_time()")
        self.sql("SELECT pg_reload_conf()")
        until = Deadline(30)
        while self.sql("SELECT pg_conf_load_time()") == before:
            if until.passed():
                raise RuntimeError("it does not read its configuration")
            time.sleep(0.02)

    @contextmanager
    def asking(self, user: str, password: str) -> Iterator[None]:
        """Meanwhile there is a user who has to show a password."""
        self.sql(f"CREATE ROLE {user} LOGIN PASSWORD '{password}'")
        rules = self._folder / "data/pg_hba.conf"
        before = rules.read_text()
        rules.write_text(f"local all {user} scram-sha-256\n{before}")
        self.reload()
        try:
            yield
        finally:
            rules.write_text(before)
            self.reload()
            self.sql(f"DROP OWNED BY {user}; DROP ROLE {user}")

    def _run(self, *command: str) -> str:
        # What a test says to libpq is for the program that it tries.
        env = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
        done = subprocess.run(
            [*_as_postgres(), *command], capture_output=True, text=True, check=False, cwd="/",
            env=env,
        )  # fmt: skip
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout
