"""Small whole policies as text, to be changed by the tests that use them."""

from importlib import resources
from pathlib import Path

from vmckpt.policy import parse
from vmckpt.policy.model import Policy

PATH = Path("mine.yaml")

GOOD = """\
version: vmckpt/v1
name: mine
description: For tests.
select:
  guests: [web*]
  guest_labels: {tier: web}
  host_labels: {rack: a1}
  memory: {at_least: 1GiB, below: 64GiB}
mode: hybrid
limits:
  max_downtime: 300ms
  bandwidth: 1gbit
  postcopy_bandwidth: 200MiB/s
  time: 30m
  time_per_gib: 150s
on_failure: retry
retries: {times: 2, first_wait: 10s, factor: 2, longest_wait: 5m}
on_postcopy_broken: recover for 5m, then ask
converge:
  stall: {window: 10s, margin: 4%, smoothing: 0.4, patience: 10s}
  rules:
  - name: long
    when: {iteration: 3, dirty_over_bandwidth: 0.8, precopy_excess: 10%}
    do: {raise_downtime: {by: 50ms, to: 500ms}}
  - when: {stalled_for: 20s, time_used: 80%, remaining_above: 1MiB, remaining_below: 1GiB}
    do: start_postcopy
  - when: {expected_downtime_above: 1s, expected_downtime_below: 2s, time_used: 5m}
    do: {auto_converge: {initial: 20, increment: 10, at_most: 60}}
  - do: abort
transport: {tls: off, connections: 1, zero_copy: false, compression: xbzrle}
storage: {copy: thin, disks: [vda], pool: fast, left_behind: remove}
forecast: {probe: off}
"""

LEAST = "version: vmckpt/v1\nname: least\n"


def policy(text: str = LEAST, *, file: str = "mine.yaml", shipped: bool = False) -> Policy:
    return parse.parse(text, Path(file), shipped=shipped)


def named(name: str, select: str = "", *, shipped: bool = False) -> Policy:
    """A policy of that name with that `select`, read from a file called like it."""
    text = f"version: vmckpt/v1\nname: {name}\n" + (f"select: {select}\n" if select else "")
    return policy(text, file=f"{name}.yaml", shipped=shipped)


SHIPPED = Path(str(resources.files("vmckpt_policies")))
"""The folder of those that come with the program."""


SCHEDULES = """\
snapshots:
  - name: often
    every: 15m
    memory: no
  - name: nightly
    at: Daily  03:00
    store: near
    keep: {last: 3, daily: 7}
    copies:
      - {to: far, keep: {monthly: 12}}
      - {to: farther}
    verify: {every: 7d, depth: deep}
  - name: paying
    every: auto
    one_failure_in: 10d
"""
