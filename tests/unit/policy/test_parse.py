import re
from contextlib import suppress
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support.policies import GOOD, LEAST, PATH, policy
from vmckpt.errors import PolicyError
from vmckpt.model.migration import AutoConverge, Compression, Mode
from vmckpt.policy import explain, parse
from vmckpt.policy.model import (
    CopyKind,
    GiveUp,
    LeftBehind,
    MoveLimits,
    OnFailure,
    RaiseDowntime,
    Retries,
    Rule,
    RuleCondition,
    Select,
    Stall,
    StartPostcopy,
    Storage,
    SwitchCost,
    Throttle,
    Tls,
    Transport,
)
from vmckpt.units import MIB, Bytes, BytesPerSecond, Seconds

S = Seconds


def test_a_good_policy_is_read_whole() -> None:
    found = policy(GOOD)

    assert (found.name, found.file, found.description) == ("mine", "mine.yaml", "For tests.")
    assert found.select == Select(
        guests=("web*",), guest_labels=(("tier", "web"),), host_labels=(("rack", "a1"),),
        at_least=Bytes(1 << 30), below=Bytes(64 << 30),
    )  # fmt: skip
    assert found.mode is Mode.HYBRID
    assert found.limits == MoveLimits(
        max_downtime=S(0.3), bandwidth=BytesPerSecond(125_000_000),
        postcopy_bandwidth=BytesPerSecond(200 * MIB), time=S(1800.0), time_per_gib=S(150.0),
    )  # fmt: skip
    assert found.retries == Retries(times=2, first_wait=S(10), factor=2, longest_wait=S(300))
    assert found.stall == Stall(window=S(10), margin=0.04, smoothing=0.4, patience=S(10))
    assert found.transport == Transport(tls=Tls.OFF, compression=Compression.XBZRLE)
    assert found.storage == Storage(
        copy=CopyKind.THIN, disks=("vda",), pool="fast", left_behind=LeftBehind.REMOVE
    )
    assert found.on_failure is OnFailure.RETRY
    assert (found.recover_for, found.probe) == (S(300), S(0))


def test_the_weights_of_a_switch_are_read_and_have_defaults() -> None:
    text = LEAST + "converge: {rules: [{when: {lowest_cost: %s}, do: %s}]}\n"

    (rule,) = policy(text % ("{total_time: 2, lost_work: 0}", "start_postcopy")).rules
    assert rule.when.lowest_cost == SwitchCost(total_time=2, postcopy_time=0.5, lost_work=0)
    assert explain.condition_text(rule.when) == (
        "post-copy now has the lowest cost (total time × 2 + post-copy × 0.5 + lost work × 0)"
    )
    with pytest.raises(PolicyError, match="total_time must be more than 0"):
        policy(text % ("{total_time: 0}", "start_postcopy"))
    with pytest.raises(PolicyError, match="write do: start_postcopy"):
        policy(text % ("{total_time: 2}", "pause"))


def test_its_rules_are_read_with_their_units_and_numbered_where_they_have_no_name() -> None:
    assert policy(GOOD).rules == (
        Rule(
            name="long",
            when=RuleCondition(iteration=3, dirty_over_bandwidth=0.8, precopy_excess=0.1),
            do=RaiseDowntime(by=S(0.05), to=S(0.5)),
        ),
        Rule(
            name="rule 2",
            when=RuleCondition(
                stalled_for=S(20), time_share=0.8, remaining_above=Bytes(MIB),
                remaining_below=Bytes(1 << 30),
            ),
            do=StartPostcopy(),
        ),
        Rule(
            name="rule 3",
            when=RuleCondition(
                expected_downtime_above=S(1), expected_downtime_below=S(2), time_used=S(300)
            ),
            do=Throttle(AutoConverge(initial=20, increment=10, at_most=60)),
        ),
        Rule(name="rule 4", when=RuleCondition(), do=GiveUp()),
    )  # fmt: skip


def test_a_name_and_a_version_are_enough() -> None:
    found = policy(LEAST)

    assert found.limits == MoveLimits(max_downtime=S(0.3))
    assert found.select == Select(by_name_only=True)
    assert (found.mode, found.rules, found.on_failure) == (Mode.AUTO, (), OnFailure.STOP)
    assert (found.recover_for, found.probe) == (S(600), S(1))
    assert not found.may_switch_early


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("version: vmckpt/v1\n", "", "1: version is missing"),
        ("vmckpt/v1", "vmckpt/v2", "1: version: input should be 'vmckpt/v1', not 'vmckpt/v2'"),
        ("name: mine\n", "", "1: name is missing"),
        ("max_downtime", "max_downtme", "11: unknown key 'max_downtme'; did you mean 'max"),
        ("converge:", "convergence:", "19: unknown key 'convergence'; did you mean 'converge'?"),
        ("  memory:", "  memoy:", "8: unknown key 'memoy'; did you mean 'memory'?"),
        ("{iteration: 3,", "{itertion: 3,", "23: unknown key 'itertion'; did you mean 'iter"),
        ("{by: 50ms", "{bye: 50ms", "24: unknown key 'bye'; did you mean 'by'?"),
        ("{raise_downtime", "{raise_downtme", "24: unknown key 'raise_downtme'; did you mean"),
        ("do: start_postcopy", "do: start_postcpy",
         "26: converge.rules.1.do: 'start_postcpy' is not a rule action;"
         " did you mean 'start_postcopy'?"),
        ("do: abort", "do: compress",
         "29: converge.rules.3.do: compress needs values, like {compress: {cache: 64MiB}}"),
        ("do: abort", "do: {compress: {cache: 100MiB}}",
         "29: converge.rules.3.do.compress.cache: must be a power of two, such as 64 MiB"),
        ("do: abort", "do: {compress: {cache: 1KiB}}",
         "29: converge.rules.3.do.compress.cache: must be a power of two, such as 4.0 KiB"),
        ("do: abort", "do: {}", "29: converge.rules.3.do: a rule must have exactly one action;"),
        ("do: abort", "do: [abort]",
         "29: converge.rules.3.do: ['abort'] is not a rule action"),
        ("- do: abort", "- name: x", "29: converge.rules.3.do is missing"),
        ("mode: hybrid", "mode: hybird",
         "9: mode: 'hybird' is not a valid value; did you mean 'hybrid'?"),
        ("tls: off", "tls: on", "30: transport.tls: True is not a valid value; known: off,"),
        ("300ms", "300", "11: limits.max_downtime: 300 is not a time; use a value with a unit"),
        ("300ms", "3 days", "11: limits.max_downtime: '3 days': unknown time unit 'days'"),
        ("300ms", "0s", "11: limits.max_downtime: '0s' must be greater than 0"),
        ("300ms", "40m",
         "11: limits.max_downtime: '40m' is more than QEMU accepts; the maximum is 2000s"),
        ("max_downtime: 300ms", "max_downtime:", "11: max_downtime has no value; add a value"),
        ("{stalled_for: 20s", "{stalled_for: ", "25: stalled_for has no value; add a value"),
        ("1gbit", "1 gbyte", "12: limits.bandwidth: '1 gbyte' is not a rate"),
        ("1gbit", "7",
         "12: limits.bandwidth: 7 is not a rate; use a value like 200MiB/s, 1gbit or"),
        ("1gbit", "1mbit", "12: limits.bandwidth: '1mbit': libvirt sets limits in whole MiB/s"),
        ("time: 30m", "time: never", "14: limits.time: 'never' is invalid; use a value like"),
        ("times: 2", "times: two", "17: retries.times: input should be a valid integer, not 'two'"),
        ("factor: 2", "factor: 0.5", "17: retries.factor: input should be greater than or equal"),
        ("recover for 5m, then ask", "recover",
         "18: on_postcopy_broken: 'recover' is invalid; use 'recover for 10m, then ask'"),
        ("margin: 4%", "margin: 4", "20: converge.stall.margin: 4 is not between 0.01% and 99%"),
        ("margin: 4%", "margin: .nan", "20: converge.stall.margin: nan is not between"),
        ("0.8,", "80,", "23: converge.rules.0.when.dirty_over_bandwidth: 80 is not between"),
        ("iteration: 3", "iteration: 0", "23: converge.rules.0.when.iteration: input should be"),
        ("time_used: 80%", "time_used: 100%", "25: converge.rules.1.when.time_used: '100%' is not"),
        ("initial: 20", "initial: 0",
         "28: converge.rules.2.do.auto_converge.initial: 0 is not a percentage"),
        ("initial: 20", "initial: 100",
         "auto_converge.initial: 100 is not a percentage of CPU time"),
        ("initial: 20", "initial: 70",
         "28: converge.rules.2.do.auto_converge: initial 70 is more than at_most 60"),
        ("connections: 1", "connections: 300", "30: transport.connections: input should be less"),
        ("zero_copy: false", "zero_copy: maybe", "30: transport.zero_copy: input should be a"),
        ("compression: xbzrle", "compression: gzip", "30: transport.compression: 'gzip' is not"),
        ("copy: thin", "copy: thick", "31: storage.copy: 'thick' is not a valid value"),
        ("probe: off", "probe: 5m", "32: forecast.probe: '5m' is not between 1s and 60s"),
        ("[web*]", "web*", "5: select.guests: must be a list, like [a, b], not 'web*'"),
        ("[web*]", "[]", "5: select.guests: must not be empty"),
        ("{tier: web}", "{tier: 1}", "6: select.guest_labels.tier: must be text"),
        ("{at_least: 1GiB, below: 64GiB}", "{}", "8: select.memory: is empty"),
        ("at_least: 1GiB", "at_least: 1TiB", "8: select.memory: at_least must be less than below"),
        ("at_least: 1GiB", "at_least: 1giga", "8: select.memory.at_least: '1giga': unknown size"),
        ("name: mine", "name: My Policy", "2: name: string should match pattern"),
        ("name: mine", "name: mine\nname: yours", "3: duplicate key 'name'"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_its_line_and_what_to_write(
    old: str, new: str, told: str
) -> None:
    assert old in GOOD
    with pytest.raises(PolicyError) as caught:
        parse.parse(GOOD.replace(old, new, 1), PATH)

    assert str(caught.value).startswith("mine.yaml:")
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_of_a_file_are_found_at_once_and_the_first_is_told_with_their_number() -> None:
    text = GOOD.replace("300ms", "300").replace("1gbit", "1").replace("copy: thin", "copy: x")

    _, problems = parse.examine(text, PATH)

    assert [one.line for one in problems] == [11, 12, 31]
    with pytest.raises(PolicyError, match=r"^mine\.yaml:11: .* \(and 2 more\)$"):
        parse.parse(text, PATH)


# For every key: values that are right, and for each mapping now and then one of any kind.
_time = st.sampled_from(["300ms", "5s", "20s", "5m", "1h"])
_size = st.sampled_from(["1MiB", "64MiB", "2GiB", 4096])
_rate = st.sampled_from(["unlimited", "1gbit", "200MiB/s"])
_share = st.sampled_from(["4%", "80%", 0.1, 0.9])
_cpu = st.sampled_from([1, 20, "30%", 99])
_word = st.sampled_from(["web*", "a", "b1"])
_labels = st.dictionaries(_word, _word, min_size=1, max_size=2)
_any = st.sampled_from(
    [
        "300ms", "0s", "unlimited", "off", "abort", "80%", "0%", "1gbit", "64MiB", "auto", "",
        "a\nb", 0, 1, -1, 0.8, 1e300, float("nan"), float("inf"), True, None, [], ["a"], {"a": 1},
    ]
)  # fmt: skip


def _mapping(**right: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    optional = st.fixed_dictionaries({}, optional=right)
    wrong = st.dictionaries(st.sampled_from([*right, "other"]), _any, max_size=1)
    merged = st.tuples(optional, wrong).map(lambda two: two[0] | two[1])
    return st.one_of(optional, optional, optional, optional, merged)


_weight = st.integers(0, 2)
_when = _mapping(
    iteration=st.integers(1, 9), stalled_for=_time, dirty_over_bandwidth=_share,
    precopy_excess=_share, expected_downtime_above=_time, expected_downtime_below=_time,
    lowest_cost=_mapping(total_time=_weight, postcopy_time=_weight, lost_work=_weight),
    time_used=st.one_of(_time, _share), remaining_above=_size, remaining_below=_size,
)  # fmt: skip
_do = st.one_of(
    st.sampled_from(["abort", "pause", "start_postcopy"]),
    st.fixed_dictionaries({"raise_downtime": st.fixed_dictionaries({"by": _time, "to": _time})}),
    st.fixed_dictionaries({"auto_converge": _mapping(initial=_cpu, increment=_cpu, at_most=_cpu)}),
    st.fixed_dictionaries({"compress": _mapping(cache=_size)}),
    _any,
)
_rules = st.lists(st.fixed_dictionaries({"do": _do}, optional={"when": _when}), max_size=3)
_documents = st.tuples(
    st.fixed_dictionaries({"version": st.just("vmckpt/v1"), "name": st.sampled_from(["a", "b-1"])}),
    _mapping(
        mode=st.sampled_from([str(one) for one in Mode]),
        select=_mapping(
            guests=st.lists(_word, min_size=1), guest_labels=_labels, host_labels=_labels,
            memory=_mapping(at_least=_size, below=_size),
        ),
        limits=_mapping(
            max_downtime=_time, bandwidth=_rate, postcopy_bandwidth=_rate, time=_time,
            time_per_gib=_time,
        ),
        retries=_mapping(
            times=st.integers(0, 9), first_wait=_time, factor=st.integers(1, 3), longest_wait=_time
        ),
        converge=_mapping(
            rules=_rules,
            stall=_mapping(window=_time, margin=_share, smoothing=_share, patience=_time),
        ),
        transport=_mapping(
            tls=st.sampled_from(["required", "preferred", "off", False]),
            connections=st.integers(1, 9), zero_copy=st.booleans(),
            compression=st.sampled_from([str(one) for one in Compression]),
            compression_level=st.integers(0, 20),
        ),
        storage=_mapping(
            copy=st.sampled_from([str(one) for one in CopyKind]), disks=st.lists(_word), pool=_word
        ),
        on_failure=st.sampled_from(["retry", "stop"]),
        on_postcopy_broken=st.sampled_from(["ask", "recover for 10m, then ask"]),
        forecast=_mapping(probe=st.sampled_from(["1s", "off", False])),
    ),
).map(lambda two: two[0] | two[1])  # fmt: skip


@given(_documents)
def test_any_document_becomes_a_policy_or_a_policy_error_in_one_line(tree: dict[str, Any]) -> None:
    found, problems = parse.examine(yaml.safe_dump(tree), PATH)

    assert all(re.fullmatch(r"mine\.yaml:[0-9]+: .+", one.at(PATH)) for one in problems)
    if found is None:
        assert problems
        return
    # What was read can be shown, and says the same when it is read again.
    assert found == parse.parse(yaml.safe_dump(tree), PATH)
    assert explain.values(found)
    assert explain.as_json(found)["name"] == found.name
    for rule in found.rules:
        assert explain.condition_text(rule.when)
        assert explain.action_text(rule.do)


@given(st.text(max_size=100))
def test_no_text_does_worse_than_a_policy_error(text: str) -> None:
    with suppress(PolicyError):
        parse.parse(LEAST + text, PATH)


def test_a_number_with_a_leading_zero_is_decimal() -> None:
    found = parse.parse("version: vmckpt/v1\nname: a\nevacuate: {tries: 010}\n", PATH)

    assert found.evacuation.tries == 10


@pytest.mark.parametrize("text", ["1:03", "1_0", "0o10"])
def test_numbers_of_yaml_1_1_are_refused(text: str) -> None:
    with pytest.raises(PolicyError, match=r":3: evacuate.tries: input should be a valid integer"):
        parse.parse(f"version: vmckpt/v1\nname: a\nevacuate: {{tries: {text}}}\n", PATH)
