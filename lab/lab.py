"""Start, find, heal and remove labs, and start a lab's lease store.

The lease store is a PostgreSQL server in its own namespace, which every host can reach.
"""

import fcntl
import json
import os
import pwd
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path

from vmckpt.errors import BadInput, LabError
from vmckpt.units import BytesPerSecond
from vmckpt_lab import certificates, config_files, host, network, plan, shell
from vmckpt_lab.machine_speed import Deadline
from vmckpt_lab.observer import client
from vmckpt_lab.plan import LABS, LabPlan
from vmckpt_lab.shell import in_namespace, run, start_daemon


def start(plan: LabPlan) -> None:
    """Create the lease store's database cluster and start it.

    Raises LabError if the server is not installed or does not start.
    """
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise LabError(
            "PostgreSQL, which the lease store needs, is not installed on this machine",
            hint="run apt-get install postgresql",
        )
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
        # Only the user postgres logs in without a password; other users log in as in production.
        hba.write(f"host all postgres {network} trust\n")
        hba.write(f"host all all {network} scram-sha-256\n")
        hba.write(f"host replication postgres {network} trust\n")
    with Path(data, "postgresql.conf").open("a") as settings:
        # A killed server must leave nothing in /dev/shm.
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
            raise LabError(f"PostgreSQL did not start in time; see {plan.folder}/witness.log")
        time.sleep(0.1)


Say = Callable[[str], None]


def silent(_line: str) -> None:
    """Discard a progress message."""


def _may(name: str) -> None:
    """Check a lab's name, and that the user is root, as namespaces require.

    Raises BadInput, LabError.
    """
    try:
        plan.check_name(name)
    except ValueError as exc:
        raise BadInput(f"lab name {exc}") from None
    if os.geteuid() != 0:
        raise LabError(
            "a lab needs root to create network namespaces", hint="run the command with sudo"
        )


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lab's lock, so that only one `lab up` runs for a name at a time.

    Commands started meanwhile inherit the lock: after `lab up` is killed, its last command may
    still be running.
    """
    path = LABS / f".{name}.lock"
    while True:
        LABS.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            # The previous holder may have removed the file; a lock on a removed file is useless.
            if not path.exists() or path.stat().st_ino != os.fstat(file.fileno()).st_ino:
                continue
            shell.HELD.append(file.fileno())
            try:
                yield
            finally:
                shell.HELD.remove(file.fileno())
                path.unlink()
                with suppress(OSError):
                    LABS.rmdir()
                    LABS.parent.rmdir()
            return


def names() -> list[str]:
    """Return the names of all labs with a directory or a namespace here, complete or not."""
    found = {p.name for p in LABS.iterdir() if p.is_dir()} if LABS.is_dir() else set()
    found |= {name.split(".")[1] for name in network.namespaces("vmckpt.")}
    return sorted(found)


def load(name: str) -> LabPlan:
    """Return the plan of a running lab. Raises LabError if the lab is not running."""
    path = LABS / name / "lab.json"
    try:
        stored = json.loads(path.read_text())
        return LabPlan(**stored)
    except FileNotFoundError:
        others = ", ".join(names()) or "none"
        raise LabError(
            f"lab {name!r} is not running (labs here: {others})",
            hint=f"run vmckpt lab up --name {name}",
        ) from None
    except (OSError, ValueError, TypeError) as exc:
        raise LabError(f"{path}: {exc}", hint=f"run vmckpt lab down --name {name}") from exc


def up(
    name: str,
    *,
    hosts: int = 2,
    shape: BytesPerSecond | None = None,
    with_witness: bool = False,
    qemu_user: str = "root",
    say: Say = silent,
) -> LabPlan:
    """Build a lab and return its plan. A lab that is already running is left unchanged.

    Remains of an incomplete lab are removed first. A lab that cannot be built is removed. `shape`:
    bandwidth limit of every link. `with_witness`: also start the lease store. `qemu_user`: the user
    that the hosts' QEMU processes run as. Raises LabError, and BadInput if the name or the user is
    invalid, or if a lab of this name is running with different settings.
    """
    _may(name)
    made = LabPlan(
        name=name, subnet=0, host_count=hosts, witness=with_witness, qemu_user=_known(qemu_user)
    )
    with locked(name):
        if (running := _whole(name)) is not None:
            if replace(running, subnet=0) != made:
                raise BadInput(
                    f"lab {name!r} is already running with {running.host_count} hosts,"
                    f" {'a' if running.witness else 'no'} lease store,"
                    f" and QEMU as user {running.qemu_user}",
                    hint=f"run vmckpt lab down --name {name} first",
                )
            say(f"lab {name} is already running")
            return running
        _remove(name, say)
        try:
            subnet = plan.free_subnet(name, network.subnets_in_use())
            return _build(replace(made, subnet=subnet), shape, say)
        except BaseException:
            _remove(name, silent)
            raise


def _whole(name: str) -> LabPlan | None:
    """Return the plan of a lab if all its hosts and its observer are running, otherwise None."""
    try:
        found = load(name)
    except LabError:
        return None
    alive = all(host.is_up(h) for h in found.hosts) and client.answers(found)
    return found if alive else None


def _known(user: str) -> str:
    try:
        pwd.getpwnam(user)
    except KeyError:
        raise BadInput(f"the QEMU user {user!r} does not exist on this machine") from None
    return user


def _build(made: LabPlan, shape: BytesPerSecond | None, say: Say) -> LabPlan:
    say(
        f"lab {made.name}: network 198.18.{made.subnet}.0/24, hosts "
        + ", ".join(h.name for h in made.hosts)
    )
    for folder in (made.shared, made.private, made.folder / "hosts"):
        folder.mkdir(parents=True)
    made.folder.chmod(0o711)
    network.build(made)
    authority = certificates.Authority(made.name)
    certificates.install_client(authority, made.folder / "pki")
    host.befriend(made, {h.name: host.furnish(made, h, authority) for h in made.hosts})
    for h in made.hosts:
        host.power_on(made, h)
    client.start(made)
    if made.witness:
        say("lease store: PostgreSQL")
        start(made)
    for h in made.hosts:
        host.wait_until_up(h)
        say(f"{h.name}: libvirt and ssh are up at {h.address}")
        if shape is not None:
            network.shape(made, h.name, shape)
    client.wait_until_up(made)
    key, known = made.folder / "ssh/id_ed25519", made.folder / "ssh/known_hosts"
    made.inventory.write_text(config_files.inventory(made, str(key), str(known)))
    _store(made)
    return made


def _store(made: LabPlan) -> None:
    """Write lab.json. This is the last step: a lab without lab.json is incomplete."""
    partial = made.folder / "lab.json.new"
    partial.write_text(json.dumps(asdict(made)))
    partial.rename(made.folder / "lab.json")


def down(name: str, say: Say = silent) -> None:
    """Remove a lab, complete or not.

    Does nothing if there is no such lab. Raises BadInput, LabError.
    """
    _may(name)
    with locked(name):
        _remove(name, say)


def _remove(name: str, say: Say) -> None:
    scratch = LabPlan(name=name, subnet=0, host_count=0)
    if scratch.folder.exists() or network.namespaces(scratch.prefix):
        say(f"lab {name}: removing")
    network.remove(scratch.prefix, scratch.bridge)
    shutil.rmtree(scratch.folder, ignore_errors=True)


def heal(lab: LabPlan, name: str) -> None:
    """Restore a host's network, remove its bandwidth limit, and power the host on if it is off.

    Raises LabError if the host does not start.
    """
    network.heal(lab, name)
    network.shape(lab, name, None)
    if not host.is_up(lab.host(name)):
        host.power_on(lab, lab.host(name))
    host.wait_until_up(lab.host(name))
