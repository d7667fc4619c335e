"""What a policy's keys say that makes no sense together."""

import pytest

from tests.support.policies import GOOD, LEAST, PATH, policy
from vmckpt.policy import parse


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("mode: hybrid", "mode: precopy",
         "26: start_postcopy is not possible in mode precopy; write mode: hybrid, or remove the"
         " rule"),
        ("mode: hybrid", "mode: precopy", "13: limits.postcopy_bandwidth has no effect"),
        ("mode: hybrid", "mode: precopy", "18: on_postcopy_broken has no effect"),
        ("mode: hybrid", "mode: stop-and-copy",
         "24: in mode stop-and-copy, the guest is already paused"),
        ("mode: hybrid", "mode: checkpoint", "24: rules apply only to migrations by QEMU"),
        ("mode: hybrid", "mode: checkpoint", "30: transport.compression has no effect in mode"),
        ("do: start_postcopy", "do: pause", "9: mode hybrid needs a start_postcopy rule; add"),
        ("  time: 30m\n  time_per_gib: 150s\n", "",
         "23: time_used is a share of the time limit, but no time limit is set;"),
        ("time: 30m", "time: 5m", "27: time_used must be less than limits.time"),
        ("time: 30m", "time: 200ms", "11: max_downtime must be less than limits.time"),
        ("to: 500ms", "to: 300ms", "24: raise_downtime to 300 ms has no effect"),
        ("expected_downtime_below: 2s", "expected_downtime_below: 1s",
         "27: expected_downtime_above must be less than expected_downtime_below"),
        ("remaining_above: 1MiB", "remaining_above: 2GiB", "25: remaining_above must be less than"),
        ("  - name: long\n", "  - do: abort\n  - name: long\n",
         "23: 'long' never acts: the earlier rule 'rule 1' always aborts before it"),
        ("  - name: long\n", "  - {when: {iteration: 2}, do: abort}\n  - name: long\n",
         "23: 'long' never acts"),
        ("  - do: abort", "  - name: long\n    do: abort", "29: two rules are named 'long'"),
        ("on_failure: retry", "on_failure: stop", "17: retries has no effect without"),
        ("retries: {times: 2, ", "retries: {", "16: on_failure: retry needs at least one retry"),
        ("longest_wait: 5m", "longest_wait: 1s", "17: longest_wait 1.0 s is less than"),
        ("compression: xbzrle", "compression_level: 3", "30: compression_level needs a compress"),
        ("xbzrle", "xbzrle, compression_level: 3", "30: xbzrle has no levels"),
        ("connections: 1, zero_copy: false, compression: xbzrle",
         "connections: 2, compression: zlib, compression_level: 12",
         "30: the highest level of zlib is 9"),
        ("connections: 1", "connections: 4",
         "30: compression xbzrle works only over one connection"),
        ("compression: xbzrle", "compression: zstd", "30: compression zstd needs parallel"),
        ("compression: xbzrle", "compression: mt",
         "30: compression mt cannot be combined with post-copy"),
        ("zero_copy: false", "zero_copy: true", "30: zero_copy needs parallel"),
        ("do: abort", "do: {compress: {}}",
         "29: compress has no effect: transport.compression is xbzrle from the start"),
        ("copy: thin", "copy: shared", "31: storage.disks has no effect without copy: full or"),
        ("copy: thin", "copy: shared", "31: storage.pool has no effect without copy: full or"),
        ("copy: thin", "copy: shared", "31: storage.left_behind has no effect without copy: full"),
        ("mode: hybrid", "mode: checkpoint",
         "31: storage.left_behind: remove is not supported in mode checkpoint"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_together_is_named_with_its_line(old: str, new: str, told: str) -> None:
    assert old in GOOD
    found, problems = parse.examine(GOOD.replace(old, new, 1), PATH)

    assert found is None
    assert any(told in one.at(PATH) for one in problems), [one.at(PATH) for one in problems]


def test_a_rule_after_a_conditional_abort_is_fine_if_it_can_come_first() -> None:
    text = LEAST + (
        "converge:\n  rules:\n"
        "  - {when: {stalled_for: 60s}, do: abort}\n"
        "  - {when: {stalled_for: 10s}, do: {auto_converge: {}}}\n"
    )

    assert len(policy(text).rules) == 2
