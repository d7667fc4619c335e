"""Measure the inputs of a forecast over ssh: a guest's memory, and the link between two hosts.

Both measurements need python3 on the hosts, to run `scripts.measure_host`. The script leaves
nothing behind: it only reads memory, and its listening process exits by itself within seconds.
"""

import json
import math
import re
import secrets
import statistics
from collections.abc import Sequence
from importlib import resources
from itertools import combinations, pairwise
from typing import Any

from vmckpt.errors import RemoteError
from vmckpt.model.guest import Guest
from vmckpt.model.migration import DirtyPoint, LinkSeen, MemorySeen
from vmckpt.remote.ssh import Remote, last_line
from vmckpt.units import Bytes, BytesPerSecond, Seconds

# Each pass takes 60 ms of CPU time; the memory of a guest with 64 MiB is read completely.
SAMPLES = 16384
LINK_TIME = Seconds(0.5)
_LONGEST = 3600.0
_NONSENSE = (ValueError, TypeError, LookupError, ArithmeticError)
# Initial fraction of the time to ignore: buffers, a token bucket's burst and slow start distort the
# result.
_BEGINNING = 0.4
# At most this many marks are compared in pairs, whatever a host sends.
_MARKS = 60


async def memory(remote: Remote, guest: Guest, times: Sequence[float]) -> MemorySeen:
    """Sample the guest's pages now, and again at each of `times`, in seconds from now.

    A page counts as dirtied if its content has changed. A page that was written with the same
    content does not count here, although QEMU sends it again. Raises RemoteError.
    """
    words = [guest.uuid, guest.name, str(guest.memory), str(SAMPLES)]
    limit = Seconds(max(times, default=0.0) + 10.0)
    answer = await _python(
        remote, ["memory", *words, ",".join(f"{one:g}" for one in times)], limit=limit
    )
    try:
        return memory_seen(answer, guest.memory)
    except _NONSENSE as exc:
        raise _nonsense(remote, exc) from exc


def _nonsense(remote: Remote, exc: Exception) -> RemoteError:
    return RemoteError(
        f"{remote.host.name}: not measured: invalid answer ({str(exc)[:80]})",
        host=remote.host.name,
        hint="make sure that logins on the host print nothing",
    )


def _number(value: object, most: float) -> float:
    """Return a number from the answer. Raises ValueError if it is not between 0 and `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(str(value)[:40])
    return value


def memory_seen(answer: dict[str, Any], size: Bytes) -> MemorySeen:
    """Parse the sampler's answer. `size`: the guest's memory in bytes.

    Raises ValueError, TypeError or LookupError if the answer is invalid.
    """
    count = max(1, int(_number(answer["samples"], SAMPLES)))
    each = size / count
    used = str(answer["used"])[:SAMPLES]
    when = [_number(point[0], _LONGEST) for point in answer["points"]]
    if any(b <= a for a, b in pairwise([0.0, *when])):
        raise ValueError("times are not ascending")
    flips_used = sum(a != b for a, b in pairwise(used))

    def error(flips: float) -> float:
        """Return two standard deviations, in bytes, of a systematic sample.

        `flips`: how often neighbours differ. Successive-difference estimator (Wolter, Introduction
        to Variance Estimation, chapter 8): the variance of a count is half the sum of squared
        differences of neighbours.
        """
        return each * 2 * math.sqrt((flips + 1) / 2)

    return MemorySeen(
        size=size,
        resident=_number(answer["resident"], count) * each,
        in_use=used.count("1") * each,
        error=error(flips_used),
        tail=_tail(used, each),
        dirtied=tuple(
            DirtyPoint(
                time=Seconds(at),
                dirtied=_number(changed, count) * each,
                error=error(_number(flips, count)),
            )
            for at, (_, changed, flips) in zip(when, answer["points"], strict=True)
        ),
        samples=count,
    )


def _tail(used: str, each: float) -> tuple[tuple[float, float], ...]:
    """Return pairs (length, bytes in use) for parts at the end of memory; lengths grow by half.

    `used`: for each sample, in order of address, "1" if it is in use, else "0". `each`: bytes that
    a sample stands for.
    """
    found, distance = [], 1
    while distance < len(used):
        found.append((distance * each, used.count("1", len(used) - distance) * each))
        distance += max(1, distance // 2)
    return (*found, (len(used) * each, used.count("1") * each))


async def resident(remote: Remote, guest: Guest) -> Bytes:
    """Return the guest's resident and swapped memory, as counted by the host's kernel.

    Needs no Python on the host. Raises RemoteError.
    """
    script = (
        'pid=$(cat "/run/libvirt/qemu/$1.pid") && tr "\\0" "\\n" <"/proc/$pid/cmdline" |'
        ' grep -qxF "$2" && grep -E "^([0-9a-f]+-|Rss:|Swap:)" "/proc/$pid/smaps"'
    )
    answer = await remote.run(["sh", "-c", script, "sh", guest.name, guest.uuid])
    found = largest_resident(answer.out, guest.memory)
    if answer.status != 0 or found is None:
        raise RemoteError(
            f"{remote.host.name}: cannot find the memory of {guest.name} in its QEMU process",
            host=remote.host.name,
        )
    return found


def largest_resident(smaps: str, size: Bytes) -> Bytes | None:
    """Return resident plus swapped bytes of the mapping with a guest's memory; None if not found.

    Takes the smallest mapping that is large enough: TCG's cache of translated code can be larger.
    """
    found: list[tuple[int, int]] = []
    for line in smaps.splitlines():
        if match := re.match(r"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ", line):
            found.append((int(match[2], 16) - int(match[1], 16), 0))
        elif found and (match := re.match(r"(?:Rss|Swap): +([0-9]{1,15}) kB", line)):
            found[-1] = (found[-1][0], found[-1][1] + int(match[1]) * 1024)
    fitting = [one for one in found if one[0] >= size]
    return Bytes(min(size, min(fitting)[1])) if fitting else None


async def link(
    source: Remote, target: Remote, address: str, lasts: Seconds = LINK_TIME
) -> LinkSeen:
    """Measure the throughput from source to target, on a port in libvirt's migration range.

    Sends zeros for `lasts` seconds. `address`: the target's address, as seen from the source.
    Raises RemoteError.
    """
    token = secrets.token_hex(16)
    waiting = await _python(target, ["listen", address, token, f"{lasts:g}"])
    try:
        port = str(int(_number(waiting["port"], 65535)))
    except _NONSENSE as exc:
        raise _nonsense(target, exc) from exc
    answer = await _python(source, ["send", address, port, token, f"{lasts:g}"])
    try:
        marks = [
            (_number(at, _LONGEST), int(_number(sent, 1 << 60))) for at, sent in answer["marks"]
        ]
        seen = link_seen(marks)
    except _NONSENSE as exc:
        raise _nonsense(source, exc) from exc
    if seen is None:
        raise RemoteError(
            f"{source.host.name}: no data of the bandwidth test arrived at {address}",
            host=source.host.name,
        )
    return seen


def link_seen(marks: Sequence[tuple[float, int]]) -> LinkSeen | None:
    """Compute the throughput from the receiver's marks: (seconds, bytes so far).

    Ignores the marks in the first `_BEGINNING` of the time, and uses at most about `_MARKS` of the
    rest. The result is the median of the slopes between all pairs of these marks (Theil-Sen
    estimator; Sen, 1968). A receiver that waited for a CPU finds a backlog in the kernel's buffers;
    this raises the slope of the pairs on both sides of it, but not the median.

    Returns None if too little data arrived for a result.
    """
    if len(marks) < 3 or marks[-1][0] <= 0:
        return None
    lasted, received = marks[-1]
    steady = [one for one in marks if one[0] >= _BEGINNING * lasted]
    steady = steady[:: len(steady) // _MARKS + 1]
    slopes = [
        (later[1] - earlier[1]) / (later[0] - earlier[0])
        for earlier, later in combinations(steady, 2)
        if later[0] > earlier[0]
    ]
    rate = statistics.median(slopes) if slopes else 0.0
    if rate <= 0:
        return None
    return LinkSeen(
        rate=BytesPerSecond(round(rate)), received=Bytes(received), lasted=Seconds(lasted)
    )


async def _python(
    remote: Remote, words: Sequence[str], *, limit: Seconds = Seconds(12.0)
) -> dict[str, Any]:
    """Run `scripts.measure_host` on the host and return its answer. Raises RemoteError."""
    program = resources.files("vmckpt.remote.scripts").joinpath("measure_host.py").read_text()
    answer = await remote.run(["python3", "-", *words], text=program, limit=limit)
    name = remote.host.name
    if answer.status == 127:
        raise RemoteError(f"{name}: not measured: python3 is not installed", host=name)
    try:
        said = json.loads(answer.out)
    except (ValueError, RecursionError):
        said = None
    if answer.status != 0 or not isinstance(said, dict):
        why = last_line(answer.err, last_line(answer.out, "no answer"))
        raise RemoteError(f"{name}: not measured: {why}", host=name)
    return said
