import pytest

from tests.support.policies import named
from tests.support.policy_ladder import BALANCED, BY_NAME, LADDER, WEB1, chosen
from vmckpt.errors import PolicyError
from vmckpt.policy import explain
from vmckpt.policy.select import Chosen, choose


def why_not(found: Chosen) -> dict[str, str]:
    return {one.policy.name: one.why for one in found.passed_over}


def test_without_any_other_policy_the_default_is_taken() -> None:
    found = chosen()

    assert found.policy is BALANCED
    assert found.why == ("the guest's name web1 matches *",)
    assert why_not(found) == {"wan": "it is used only if requested by name"}


@pytest.mark.parametrize("place", range(len(LADDER)), ids=[one.name for one in LADDER])
def test_the_most_specific_policy_wins_whatever_their_order(place: int) -> None:
    rest = LADDER[place:]

    assert chosen(*rest).policy is rest[0]
    assert chosen(*reversed(rest)).policy is rest[0]


@pytest.mark.parametrize(
    ("select", "why"),
    [
        ("{guests: [db*, mail*]}", "the guest's name does not match db* or mail*"),
        ("{guests: [WEB1]}", "the guest's name does not match WEB1"),
        ("{guest_labels: {tier: db}}", "the guest's label tier is not db: it is web"),
        ("{guest_labels: {size: xl}}", "the guest's label size is not xl: it is missing"),
        ("{host_labels: {rack: b1}}", "the host's label rack is not b1: it is a1"),
        ("{memory: {at_least: 9GiB}}", "the guest has less memory than 9.0 GiB"),
        ("{memory: {below: 8GiB}}", "the guest has 8.0 GiB of memory or more"),
        ("{guests: [web1], host_labels: {rack: b}}", "the host's label rack is not b: it is a1"),
    ],
)  # fmt: skip
def test_a_policy_of_which_one_condition_does_not_hold_is_passed_over_with_the_reason(
    select: str, why: str
) -> None:
    found = chosen(named("other", select))

    assert found.policy is BALANCED
    assert why_not(found)["other"] == why


def test_a_less_specific_policy_is_passed_over_with_the_reason() -> None:
    found = chosen(*LADDER)

    assert why_not(found) == {
        "two-labels": "exact names the guest exactly",
        "label-and-host": "exact names the guest exactly",
        "label-and-glob": "exact names the guest exactly",
        "label": "exact names the guest exactly",
        "host": "exact names the guest exactly",
        "both-bounds": "exact names the guest exactly",
        "one-bound": "exact names the guest exactly",
        "long-glob": "exact names the guest exactly",
        "short-glob": "exact names the guest exactly",
        "own-default": "exact names the guest exactly",
        "balanced": "exact names the guest exactly",
        "wan": "it is used only if requested by name",
    }
    assert why_not(chosen(*LADDER[10:]))["balanced"] == (
        "own-default is the operator's own policy, and this policy is shipped with vmckpt"
    )


def test_of_several_globs_the_most_specific_one_that_matches_counts() -> None:
    several = named("several", "{guests: ['*', 'db-main', 'web[0-9]']}")
    other = named("other", "{guests: ['we*']}")

    assert chosen(several, other).policy is several


def test_two_that_are_equally_specific_are_an_error_that_names_both_files() -> None:
    one, other = (
        named("one", "{guest_labels: {tier: web}}"),
        named("other", "{guest_labels: {env: prod}}"),
    )

    with pytest.raises(PolicyError) as caught:
        chosen(one, other)
    assert str(caught.value) == (
        "one.yaml and other.yaml are equally specific for web1; add a condition to the select of"
        " one policy, or choose a policy with --policy"
    )


def test_two_that_are_equal_do_no_harm_below_a_more_specific_one() -> None:
    one, other = named("one", "{guests: [web*]}"), named("other", "{guests: ['*eb1']}")

    assert chosen(one, other, LADDER[0]).policy is LADDER[0]


def test_a_policy_asked_for_by_name_is_taken_whatever_its_select_says() -> None:
    found = chosen(*LADDER, forced="wan")

    assert found.policy is BY_NAME
    assert explain.choice(found)[0] == "wan, because it was requested by name"
    assert len(found.passed_over) == len(LADDER) + 1


def test_an_unknown_name_is_refused_with_the_likely_one() -> None:
    with pytest.raises(PolicyError, match=r"^no policy 'balancd'; did you mean 'balanced'\?$"):
        chosen(forced="balancd")


def test_where_no_policy_is_for_a_guest_the_default_is_taken_and_says_so() -> None:
    narrowed = named("balanced", "{guests: [db*]}")

    found = choose([narrowed, BY_NAME], WEB1)

    assert found.policy is narrowed
    assert found.why == ("no policy matches web1, and balanced is the default",)
