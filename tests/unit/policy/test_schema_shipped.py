"""The policies that ship, their schema, and what explain says of them."""

import re
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.policies import SHIPPED, policy
from vmckpt.model.migration import Mode
from vmckpt.policy import compatibility, explain, loader
from vmckpt.policy.compatibility import Versions
from vmckpt.policy.model import GiveUp, Pause, Policy, RaiseDowntime, StartPostcopy, Throttle

FILES = sorted(SHIPPED.glob("*.yaml"))
POLICIES = {one.name: one for one in loader.load_all(None)}
DOCUMENT = ROOT / "docs/policies.md"
DEBIAN12 = Versions(qemu="7.2.22", libvirt="9.0.0")

_KEY = re.compile(r"\s*(- )?[a-z_]+:( |$)")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_key_has_a_comment_on_its_line_or_above_it(path: Path) -> None:
    lines = path.read_text().splitlines()
    bare = [
        line
        for above, line in zip(["", *lines], lines, strict=False)
        if _KEY.match(line) and " #" not in line and not above.lstrip().startswith("#")
    ]

    assert bare == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_shipped_policy_is_called_like_its_file_and_says_what_it_is(path: Path) -> None:
    found = POLICIES[path.stem]

    assert found.description
    assert path.read_text().splitlines()[2].startswith(f"# {path.stem}: ")


@pytest.mark.parametrize("found", POLICIES.values(), ids=lambda found: found.name)
def test_only_the_default_is_for_somebody_who_does_not_ask(found: Policy) -> None:
    assert found.select.by_name_only == (found.name != "balanced")


@pytest.mark.parametrize("found", POLICIES.values(), ids=lambda found: found.name)
def test_debian_12_can_do_all_that_they_want(found: Policy) -> None:
    assert compatibility.conflicts(found, source=DEBIAN12, target=DEBIAN12) == ()


def test_the_default_shows_every_key_that_is_no_matter_of_the_guest() -> None:
    unsaid = {one.key for one in explain.values(POLICIES["balanced"]) if one.where == "default"}

    storage = {"storage.disks", "storage.pool", "storage.left_behind"}
    assert unsaid == {"transport.compression_level", *storage}


def test_they_do_what_their_names_say() -> None:
    def does(name: str) -> list[type]:
        return [type(rule.do) for rule in POLICIES[name].rules]

    assert POLICIES["balanced"].mode is Mode.AUTO
    assert does("balanced") == [StartPostcopy, StartPostcopy, Throttle]
    assert POLICIES["low-downtime"].limits.max_downtime == pytest.approx(0.1)
    assert RaiseDowntime not in does("low-downtime")
    assert does("must-finish")[-1] is Pause
    assert GiveUp not in does("must-finish")
    assert explain.limit(POLICIES["must-finish"]) == "none"
    for name in ("never-postcopy", "low-downtime", "huge-memory"):
        assert not POLICIES[name].may_switch_early
    assert POLICIES["huge-memory"].transport.connections == 8
    assert str(POLICIES["wan"].transport.tls) == "required"
    assert does("maintenance")[0] is StartPostcopy
    assert POLICIES["busy"].mode is Mode.CHECKPOINT


def test_where_postcopy_can_be_used_something_else_is_tried_after_it() -> None:
    for found in POLICIES.values():
        if found.may_switch_early:
            last = max(
                number
                for number, rule in enumerate(found.rules)
                if isinstance(rule.do, StartPostcopy)
            )
            assert last < len(found.rules) - 1


def test_the_documentation_names_every_key_and_its_first_example_is_right() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| `([a-z_.]+)`", text, re.MULTILINE))
    keys = {one.key for one in explain.values(POLICIES["balanced"])}
    example = text.split("```yaml\n")[1].split("```")[0]
    shop = policy(example)

    missing = {key for key in keys if key != "select" and not key.startswith("converge.rules.")}
    assert missing - rows == set()
    assert [type(rule.do) for rule in shop.rules] == [StartPostcopy, GiveUp]
