"""The outside client of a Debian guest's database. It runs in the observer's namespace.

    python -m vmckpt_lab.debian.client record ADDRESS FILE
    python -m vmckpt_lab.debian.client check ADDRESS

`record` commits one number after another, and records each acknowledgement in the file. `check`
prints the database's state as JSON; see `commits.Database`.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import psycopg

from vmckpt_lab.debian.commits import Database

_PAUSE = 0.02
"""Seconds between two commits: pgbench keeps the guest busy, not this client."""
_AGAIN = 0.5
_USER = "user=postgres dbname=postgres connect_timeout=5 tcp_user_timeout=60000"
_SUMS = """select (select sum(abalance) from pgbench_accounts),
    (select sum(tbalance) from pgbench_tellers), (select sum(bbalance) from pgbench_branches),
    (select coalesce(sum(delta), 0) from pgbench_history)"""


def record(address: str, file: Path) -> None:
    """Commit numbers until killed. A number whose commit failed is not used again.

    `address`: of the guest; `file`: gets one line for each acknowledged commit and each error.
    """
    number = 0
    with file.open("a") as told:
        while True:
            try:
                with psycopg.connect(f"host={address} {_USER}", autocommit=True) as connection:
                    while True:
                        number += 1
                        connection.execute("insert into commits values (%s)", [number])
                        told.write(f"{number} {time.monotonic():.6f}\n")
                        told.flush()
                        time.sleep(_PAUSE)
            except psycopg.Error as exc:
                said = str(exc).strip().splitlines()[:1] or [type(exc).__name__]
                told.write(f"error {time.monotonic():.6f} {said[0]}\n")
                told.flush()
                time.sleep(_AGAIN)


def check(address: str) -> Database:
    """Read the database's state. Raises psycopg.Error."""
    with psycopg.connect(f"host={address} {_USER}") as connection:
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        numbers = [int(row[0]) for row in connection.execute("select number from commits")]
        (sums,) = connection.execute(_SUMS).fetchall()
        (broken,) = connection.execute(
            "select coalesce(sum(checksum_failures), 0) from pg_stat_database"
        ).fetchall()
    return Database(tuple(numbers), tuple(int(one) for one in sums), int(broken[0]))


def main(words: Sequence[str]) -> None:
    """Run one of the two commands."""
    if words[0] == "record":
        record(words[1], Path(words[2]))
    sys.stdout.write(json.dumps(asdict(check(words[1]))))


if __name__ == "__main__":
    main(sys.argv[1:])
