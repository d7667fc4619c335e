"""The witness: PostgreSQL in a namespace that every host reaches and that is part of none."""

import shutil
import subprocess
import time
from pathlib import Path

from vmckpt.errors import LabError
from vmckpt.lab.pace import Deadline
from vmckpt.lab.plan import LabPlan
from vmckpt.lab.shell import in_namespace, run, start_daemon


def start(plan: LabPlan) -> None:
    """Create a cluster and start it; LabError if PostgreSQL is not installed or does not start."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise LabError("the witness needs PostgreSQL", mend="run apt-get install postgresql")
    data = plan.folder / "witness"
    data.mkdir(mode=0o700)
    shutil.chown(data, "postgres", "postgres")
    as_postgres = ["setpriv", "--reuid=postgres", "--regid=postgres", "--init-groups"]
    run(
        [
            *as_postgres,
            f"{programs[-1]}/initdb",
            "--auth=trust",
            "--username=postgres",
            "--encoding=UTF8",
            "--no-sync",
            str(data),
        ]
    )
    network = f"198.18.{plan.subnet}.0/24"
    with Path(data, "pg_hba.conf").open("a") as hba:
        # Only the owner needs no password: other logins are as they are in life.
        hba.write(f"host all postgres {network} trust\n")
        hba.write(f"host all all {network} scram-sha-256\n")
        hba.write(f"host replication postgres {network} trust\n")
    with Path(data, "postgresql.conf").open("a") as settings:
        # Of one that is killed nothing is to stay in /dev/shm.
        settings.write("dynamic_shared_memory_type = mmap\n")
    server = [f"{programs[-1]}/postgres", "-D", str(data)]
    server += ["-c", f"listen_addresses={plan.witness_address}"]
    server += ["-c", f"unix_socket_directories={data}"]
    command = in_namespace(plan.witness_namespace, *as_postgres, *server)
    start_daemon(command, plan.folder / "witness.log")
    _wait(programs[-1], plan)


def _wait(programs: Path, plan: LabPlan, *, limit: float = 30.0) -> None:
    give_up = Deadline(limit)
    ready = [f"{programs}/pg_isready", "-q", "-h", plan.witness_address]
    while subprocess.run(ready, check=False).returncode != 0:
        if give_up.passed():
            raise LabError(f"PostgreSQL does not start; see {plan.folder}/witness.log")
        time.sleep(0.1)
