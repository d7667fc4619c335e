"""One function for each reader of foreign data: any bytes in; it raises only if that is a fault.

Each reader may refuse by the errors that it promises, in one line; what it does not refuse must
make sense.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.fuzz import store_targets
from vmckpt import inventory, units
from vmckpt.cli import arguments
from vmckpt.errors import BadInput, RemoteError
from vmckpt.hypervisor import domain_xml, migration, storage
from vmckpt.hypervisor.connection import NONSENSE
from vmckpt.migration import replay, trace
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.model.migration import JobSample, MoveOrder
from vmckpt.policy import explain, loader, parse
from vmckpt.policy.model import Policy
from vmckpt.remote import images, measure, probe
from vmckpt.units import MIB, Bytes, Seconds

PATH = Path("file.yaml")
HOST = Host(name="alpha", uri="qemu:///system")
_LONGEST_LINE = 2000
_MOST = 1 << 63


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _one_line(text: object) -> None:
    line = str(text)
    assert line
    assert len(line) <= _LONGEST_LINE, len(line)
    assert "\n" not in line


def _json(data: bytes) -> Any:
    """What a driver or the journal would hand on; None if it is no JSON."""
    with suppress(ValueError, RecursionError):
        return json.loads(data)
    return None


def read_inventory(data: bytes) -> None:
    try:
        found = inventory.parse(_text(data), PATH)
    except BadInput as exc:
        _one_line(exc)
        return
    for name, host in found.hosts.items():
        assert name.isprintable()
        assert host.uri_for_peers


def read_policy(data: bytes) -> None:
    policy, problems = parse.examine(_text(data), PATH)
    assert (policy is None) == bool(problems)
    for problem in problems:
        _one_line(problem.at(PATH))
    if policy is not None:
        assert explain.values(policy)


def read_domain(data: bytes) -> None:
    text = _text(data)
    with suppress(*NONSENSE):
        found = domain_xml.guest(
            text, state=1, persistent=True, autostart=False, snapshots=0, job=None
        )
        _sane_guest(found)
    with suppress(*NONSENSE):
        drives = storage.read_drives(text)
        moved = storage.with_images_at(text, {drive.name: "/x" for drive in drives})
        assert len(storage.read_drives(moved)) == len(drives)


def _sane_guest(guest: Guest) -> None:
    assert 0 <= guest.memory < _MOST
    assert 0 <= guest.vcpus < _MOST
    assert isinstance(guest.name, str)
    assert isinstance(guest.labels, Mapping)


def read_capabilities(data: bytes) -> None:
    with suppress(*NONSENSE):
        types, accelerators = domain_xml.machines(_text(data))
        assert all(types)
        assert all(accelerators)
        assert isinstance(domain_xml.host_uuid(_text(data)), str)


def read_statistics(data: bytes) -> None:
    stats = _json(data)
    with suppress(*NONSENSE):
        domain_xml.is_migration(stats)
        _sane_sample(domain_xml.job_sample(stats, at=Seconds(0.0), paused=False, post_copy=False))
    with suppress(*NONSENSE):
        totals = domain_xml.job_totals(stats)
        assert 0 <= totals.total < _MOST
        assert 0 <= totals.transferred < _MOST


def _sane_sample(sample: JobSample) -> None:
    numbers = (
        sample.iteration, sample.remaining, sample.total, sample.transferred, sample.bandwidth,
        sample.dirty_rate or 0, sample.expected_downtime or 0, sample.throttle,
    )  # fmt: skip
    assert all(not isinstance(one, bool) and 0 <= one < _MOST for one in numbers), numbers


@cache
def _policies() -> tuple[Policy, ...]:
    return loader.load_all(None)


def read_trace(data: bytes) -> None:
    try:
        recorded = trace.parse(_text(data).splitlines(), "t.jsonl")
    except BadInput as exc:
        _one_line(exc)
        return
    for policy in _policies():
        told = replay.under(policy, recorded)
        json.dumps(told.as_json())
        for planned in told.result.decided:
            assert units.show_seconds(planned.at)


def read_order(data: bytes) -> None:
    try:
        order = MoveOrder.from_json(_json(data))
    except (TypeError, KeyError, ValueError) as exc:
        _one_line(repr(str(exc)[:200]))
        return
    assert MoveOrder.from_json(json.loads(json.dumps(order.as_json()))).driver is order.driver
    assert isinstance(migration.migration_flags(order), int)
    assert isinstance(migration.migration_params(order, HOST), Mapping)


def read_units(data: bytes) -> None:
    text = _text(data)
    for read, show in (
        (units.parse_bytes, units.show_bytes),
        (units.parse_seconds, units.show_seconds),
        (units.parse_rate, units.show_rate),
    ):
        with suppress(ValueError):
            value = read(text)
            assert math.isfinite(value)
            assert value >= 0
            assert show(value)
    for option in (arguments.seconds, arguments.rate, arguments.probe_time):
        try:
            option(text)
        except Exception as exc:
            if type(exc).__name__ != "BadParameter":
                raise
            _one_line(str(exc).replace("\n", " "))


def read_probe(data: bytes) -> None:
    text = _text(data)
    for read in (
        lambda: probe.parse(text, asked=1.0, answered=2.0, host="alpha"),
        lambda: probe.parse_certificates(text, "alpha"),
    ):
        try:
            seen = read()
        except RemoteError as exc:
            _one_line(exc)
        else:
            assert math.isfinite(getattr(seen, "clock_skew", 0.0))
            assert all(0 <= room < _MOST for room in getattr(seen, "storage_free", {}).values())
    found = measure.largest_resident(text, Bytes(64 * MIB))
    assert found is None or 0 <= found <= 64 * MIB


_READING = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)


def read_answers(data: bytes) -> None:
    """What a host's qemu-img and its sampler say."""
    for kind in ("raw", "qcow2"):
        with suppress(*_READING, RecursionError):
            image = images.parse(_text(data), "640", kind)
            assert 0 <= image.size < _MOST
            assert not set(image.options) & set(" ;$`'\"\n/-"), image.options
    said = _json(data)
    if isinstance(said, dict):
        with suppress(*_READING):
            seen = measure.memory_seen(said, Bytes(64 * MIB))
            assert 0 <= seen.in_use <= 64 * MIB * (1 + 1e-9) * max(1, len(str(said.get("used"))))
            assert all(point.time > 0 for point in seen.dirtied)


TARGETS: Mapping[str, Callable[[bytes], None]] = {
    "inventory": read_inventory,
    "policy": read_policy,
    "domain": read_domain,
    "capabilities": read_capabilities,
    "statistics": read_statistics,
    "trace": read_trace,
    "order": read_order,
    "units": read_units,
    "probe": read_probe,
    "answers": read_answers,
    **store_targets.TARGETS,
}
"""By name. A finding is any exception, more than 5 s, or more than 1 GiB."""
JSON = ("statistics", "trace", "order", "answers", "small")
"""Those that take lines of it."""
