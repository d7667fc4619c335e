"""Roles and the audit trail, on real hosts: a user that became root, and a controller that dies."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.bench import BUSY, SLOW, VMCKPT, Bench, Done, finish, first_line
from vmckpt_lab import network

# As sudo does it: the command's process is root's, and that of its parent is the user's.
SUDO = """
import os, subprocess, sys
os.setresuid(65534, 0, 0)
done = subprocess.run(sys.argv[1:], preexec_fn=lambda: os.setresuid(0, 0, 0))
sys.exit(done.returncode)
"""


@pytest.fixture
def roles(bench: Bench) -> Iterator[Path]:
    """An inventory in which the user "nobody" has the role move, but not the role destroy."""
    path = bench.plan.folder / "roles.yaml"
    path.write_text(
        bench.plan.inventory.read_text()
        + "roles: {move: {users: [nobody]}, destroy: {users: [daemon]}}\n"
    )
    yield path
    path.unlink()


def as_nobody(bench: Bench, roles: Path, *args: str) -> Done:
    environment = {**bench.environment, "VMCKPT_INVENTORY": str(roles), "SUDO_USER": "daemon"}
    process = subprocess.Popen(
        [sys.executable, "-c", SUDO, *VMCKPT, *args], env=environment, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    return finish(process)


def test_a_user_that_became_root_has_the_users_role(bench: Bench, roles: Path) -> None:
    bench.guest()
    refused = as_nobody(bench, roles, "recover")
    assert (refused.code, refused.out) == (7, "")
    assert "user nobody may not run vmckpt recover: it needs the role destroy" in refused.err
    moved = as_nobody(bench, roles, "migrate", "web1", "--to", "beta", "--probe", "off")
    assert moved.code == 0, moved.err
    assert bench.where() == ["beta"]

    trail = bench.good("audit", "list", "--json").json
    mine = [one for one in trail if one["sudo_user"] == "nobody"]
    assert {one["uid"] for one in mine} == {0}
    assert (mine[0]["what"], mine[0]["step"]) == ("refused", "vmckpt recover")
    whats = [one["what"] for one in mine[1:]]
    assert (whats[0], whats[-1], mine[-1]["outcome"]) == ("began", "ended", "completed")
    assert "intended" in whats
    assert {(one["guest"], one["source"], one["target"]) for one in mine[1:]} == {
        ("web1", "alpha", "beta")
    }
    assert (
        bench.good("audit", "verify", "--head", mine[0]["digest"], "--json").json["broken"] is None
    )


def test_the_chain_goes_on_after_a_controller_was_killed(bench: Bench) -> None:
    bench.guest(**BUSY)
    for host in ("alpha", "beta"):
        network.shape(bench.plan, host, SLOW)
    process = bench.start("migrate", "web1", "--to", "beta", "--tls", "off", "--mode", "precopy")
    first_line(process, "iteration=1")
    process.kill()
    process.communicate()
    before = bench.good("audit", "verify", "--json").json
    bench.good("recover")

    job = bench.good("jobs", "--all", "--json").json[0]["job"]
    mine = [one for one in bench.good("audit", "list", "--json").json if one["job"] == job]
    assert [one["what"] for one in mine].count("taken-over") == 1
    assert mine[-1]["what"] == "ended"
    after = bench.good("audit", "verify", "--head", before["head"], "--json").json
    assert after["broken"] is None
    assert after["entries"] > before["entries"]
