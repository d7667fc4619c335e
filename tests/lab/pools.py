"""A storage pool that both hosts have: the directory that they share."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from tests.lab.bench import Bench
from vmckpt_lab import host

HOSTS = ("alpha", "beta")


@contextmanager
def shared_pool(bench: Bench, name: str) -> Iterator[str]:
    """Define and start the pool on both hosts, and undefine it at the end."""
    for at in HOSTS:
        target = ("--target", str(bench.plan.shared))
        bench.inside(at, "virsh", "pool-define-as", name, "dir", *target)
        bench.inside(at, "virsh", "pool-start", name)
    yield name
    for at in HOSTS:
        for command in ("pool-destroy", "pool-undefine"):
            words = host.enter(bench.plan.host(at), "virsh", command, name)
            subprocess.run(words, capture_output=True, check=False)
