"""Names of forks, which forks a command means, and which of several did best."""

import pytest

from vmckpt.errors import BadInput, HostUnreachable
from vmckpt.snapshot import fork_rules
from vmckpt.snapshot.fork_rules import Family, Fork, ForkRequest, ForkTree, Ran
from vmckpt.units import Bytes, Seconds


def ran(name: str, output: str = "", status: int = 0) -> Ran:
    return Ran(name=name, status=status, took=Seconds(1.0), output=output)


@pytest.mark.parametrize(
    ("results", "best"),
    [
        ([], None),
        ([ran("a", status=1), ran("b", status=-15)], None),
        ([ran("a", status=1), ran("b"), ran("c")], "b"),
        ([ran("a", "1"), ran("b", "3\n"), ran("c", "2")], "b"),
        ([ran("a", "-7"), ran("b", "-2.5"), ran("c", "-1e3")], "b"),
        ([ran("a", "5"), ran("b", "9", status=1)], "a"),  # only successful commands count
        ([ran("a", "5"), ran("b", "9"), ran("c", "done")], "a"),  # one prints no number
        ([ran("a", "5"), ran("b", "9"), ran("c", "done", status=2)], "b"),
        ([ran("a", "4"), ran("b", "4")], "a"),
        ([ran("a", "9\nslower\n 3 \n\n"), ran("b", "4")], "b"),  # the last line that is not empty
        ([ran("a", "nan"), ran("b", "4")], "a"),
        ([ran("a", "1e999"), ran("b", "4")], "a"),
        ([ran("a", "1_0"), ran("b", "4")], "a"),
        ([ran("a", "12 ms"), ran("b", "4")], "a"),
    ],
)
def test_the_best_fork(results: list[Ran], best: str | None) -> None:
    assert fork_rules.best(results) == best


@pytest.mark.parametrize(
    ("prefix", "count", "taken", "names"),
    [
        ("web1-fork", 2, set[str](), ("web1-fork-1", "web1-fork-2")),
        ("t", 3, {"t-1", "t-3", "t"}, ("t-2", "t-4", "t-5")),
        ("t", 1, {"t-2"}, ("t-1",)),
    ],
)
def test_names_that_are_taken_are_skipped(
    prefix: str, count: int, taken: set[str], names: tuple[str, ...]
) -> None:
    assert fork_rules.names(prefix, count, taken) == names


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (ForkRequest(source="web1"), None),
        (ForkRequest(source="web1", count=256, prefix="a b"), None),
        (ForkRequest(source="web1", count=0), "0 forks were requested; a family has 1 to 256"),
        (ForkRequest(source="web1", count=257), "257 forks were requested"),
        (ForkRequest(source="web1", prefix="../x"), "cannot be the name of a guest"),
        (ForkRequest(source="web1", prefix=" "), "cannot be the name of a guest"),
        (ForkRequest(source="web1", prefix="a\nb"), "cannot be the name of a guest"),
    ],
)
def test_a_request_is_checked_first(request_: ForkRequest, why: str | None) -> None:
    if why is None:
        fork_rules.check(request_)
        return
    with pytest.raises(BadInput, match=why):
        fork_rules.check(request_)


def test_a_command_gets_the_name_of_its_fork_quoted() -> None:
    assert fork_rules.command_for("ssh {} 'x {}'", "a b") == "ssh 'a b' 'x 'a b''"
    assert fork_rules.environment(name="a", uuid="u", host="h", family="f") == {
        "VMCKPT_GUEST": "a", "VMCKPT_UUID": "u", "VMCKPT_HOST": "h", "VMCKPT_FAMILY": "f",
    }  # fmt: skip


def family(id_: str, *names: str, host: str = "alpha", snapshot: str = "s-1") -> Family:
    forks = tuple(
        Fork(uuid=f"u-{host}-{name}", name=name, runs=True, memory=Bytes(1), disk=Bytes(2))
        for name in names
    )
    return Family(
        id=id_, host=host, template="web1", snapshot=snapshot, store="near", forks=forks
    )  # fmt: skip


TREE = ForkTree(families=(
    family("fam-1", "a", "b"), family("fam-2", "c"),
    family("fam-3", "b", "d", host="beta", snapshot="s-2"),
))  # fmt: skip
SILENT = ForkTree(families=TREE.families, errors={"gamma": "no answer"})


@pytest.mark.parametrize(
    ("words", "id_", "found"),
    [
        (["a"], None, {"fam-1": ["a"]}),
        (["a", "d", "a"], None, {"fam-1": ["a"], "fam-3": ["d"]}),
        (["u-beta-b"], None, {"fam-3": ["b"]}),
        ([], "fam-3", {"fam-3": ["b", "d"]}),
        (["c"], "fam-1", {"fam-1": ["a", "b"], "fam-2": ["c"]}),
    ],
)
def test_forks_are_found_by_name_uuid_and_family(
    words: list[str], id_: str | None, found: dict[str, list[str]]
) -> None:
    parts = fork_rules.chosen(TREE, words, id_)
    assert {one.id: [fork.name for fork in one.forks] for one in parts} == found


@pytest.mark.parametrize(
    ("tree", "words", "id_", "kind", "why"),
    [
        (TREE, ["b"], None, BadInput, "fork b is on several hosts: alpha, beta; name it by its"),
        (
            TREE,
            ["web1"],
            None,
            BadInput,
            "web1 is not a fork of a family; nothing was changed; run",
        ),
        (TREE, ["a", "e"], None, BadInput, "e is not a fork"),
        (TREE, [], "fam-9", BadInput, "no host that answered has a family fam-9; .* did you mean"),
        (
            SILENT,
            ["web1"],
            None,
            HostUnreachable,
            "no answer from gamma: no answer; run vmckpt doc",
        ),
        (SILENT, [], "fam-9", HostUnreachable, "no answer from gamma"),
    ],
)
def test_what_is_not_one_fork_is_refused(
    tree: ForkTree, words: list[str], id_: str | None, kind: type[Exception], why: str
) -> None:
    with pytest.raises(kind, match=why):
        fork_rules.chosen(tree, words, id_)


def test_a_snapshot_is_unused_when_the_last_fork_of_all_its_families_is_gone() -> None:
    first, second, third = TREE.families
    assert fork_rules.complete(TREE, fork_rules.chosen(TREE, ["a", "c"], None)) == (second,)
    assert fork_rules.unused(TREE, [first]) == ()  # fam-2 uses the same snapshot
    assert fork_rules.unused(TREE, [first, second]) == (("near", "s-1"),)
    assert fork_rules.unused(TREE, [third]) == (("near", "s-2"),)
    assert fork_rules.unused(SILENT, [third]) == ()  # gamma may have another family
