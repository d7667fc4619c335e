"""Compare the results of the snapshot bench with its goals. Pure."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

OURS = "vmckpt"
Row = dict[str, Any]


def rows(result: dict[str, Any]) -> list[Row]:
    """Return a row for each figure of the phases that ran."""
    found: list[Row] = []
    if "live" in result:
        found += _live(result["live"])
    if "compare" in result:
        told = result["compare"]
        found += [
            _row("compare: share of a plain read's bandwidth", told["share_ms"], least=0.7),
            _row("compare: the same by CPU time", told["share_cpu_ms"], least=0.7),
        ]
    if "memory" in result:
        most = max(max(one["first"], one["second"], one["restore"]) for one in result["memory"])
        found.append(_row("highest memory use, 256 MiB to 4 GiB, MiB", most, most=300))
    if "peers" in result:
        found += _peers(result["peers"]["turns"])
    return found


def _row(what: str, is_: float, *, least: float | None = None, most: float | None = None) -> Row:
    kept = (least is None or is_ >= least) and (most is None or is_ <= most)
    wanted = f">= {least:g}" if least is not None else f"<= {most:g}"
    return {"what": what, "is": is_, "wanted": wanted, "kept": kept}


def _middle(turns: Sequence[dict[str, Any]], *keys: str) -> float:
    def one(turn: Any) -> float:
        for key in keys:
            turn = turn[key]
        return float(turn)

    return statistics.median(one(turn) for turn in turns)


def _live(told: dict[str, Any]) -> Iterator[Row]:
    parts = {"shared": _shared, "tracked": _tracked, "idle": _idle, "busy": _busy}
    for name, rows_of in parts.items():
        if name in told and "failed" not in told[name]:
            yield from rows_of(told[name])


def _shared(told: dict[str, Any]) -> Iterator[Row]:
    yield _row(
        "pause, incremental, 256 MiB of shared memory, engine, ms",
        _middle(told["engine"]["turns"], "pause_ms"),
        most=40,
    )
    if "failed" not in told["with_disks"]:
        yield _row(
            "the same by `snapshot create --way shared`, with its disk, ms",
            _middle(told["with_disks"]["turns"], "pause_ms"),
            most=40,
        )


def _tracked(told: dict[str, Any]) -> Iterator[Row]:
    small, large = (told[mib]["turns"] for mib in sorted(told, key=int))
    ratio = _middle(large, "took_ms") / _middle(small, "took_ms")
    yield _row("second snapshot, 64 MiB written: 4 GiB guest / 256 MiB guest", ratio, most=1.5)
    for turns, size in ((small, "256 MiB"), (large, "4 GiB")):
        what = f"pause, write tracking, with its disk, {size}, ms"
        yield _row(what, _middle(turns, "pause_ms"), most=40)


def _idle(told: dict[str, Any]) -> Iterator[Row]:
    share = statistics.median(told["later_bytes"]) / told["first_bytes"]
    back = told["restores"]
    yield _row("second snapshot of an idle guest, % of the first", 100 * share, most=1)
    took = _middle(back, "took_ms") / 1000
    yield _row("restore of 256 MiB to running, on its host, s", took, most=1.5)
    yield _row("the same, the whole command, s", _middle(back, "command"), most=1.5)


def _busy(told: dict[str, Any]) -> Iterator[Row]:
    yield _row("pause, background, busy 512 MiB, ms", _middle(told["turns"], "pause_ms"), most=15)
    yield _row("its work meanwhile, share", _middle(told["turns"], "share"), least=0.7)


def _peers(turns: dict[str, list[dict[str, Any]]]) -> Iterator[Row]:
    peers = [name for name in turns if name != OURS]
    for what in ("first", "second", "restore"):
        for measure in ("seconds", "cpu"):
            ours = _middle(turns[OURS], what, measure)
            for peer in peers:
                ratio = _middle(turns[peer], what, measure) / ours
                yield _row(f"{what}: {peer} takes so many times our {measure}", ratio, least=1.5)
    for key, what in (("first", "first snapshot"), ("", "both snapshots")):
        keys = (key, "bytes") if key else ("bytes",)
        better = min(_middle(turns[peer], *keys) for peer in peers)
        yield _row(
            f"size of {what}, of the better peer's", _middle(turns[OURS], *keys) / better, most=1.1
        )
