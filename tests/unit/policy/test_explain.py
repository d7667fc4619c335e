"""What a policy says, key by key, and why it was chosen."""

from tests.support.policies import GOOD, LEAST, SCHEDULES, policy
from tests.support.policy_ladder import LADDER, chosen
from vmckpt.policy import explain


def test_every_value_is_explained_with_its_line_or_as_default() -> None:
    rows = {one.key: one for one in explain.values(policy(GOOD))}

    assert (rows["limits.max_downtime"].value, rows["limits.max_downtime"].where) == (
        "300 ms",
        "mine.yaml:11",
    )
    assert rows["transport.compression_level"].where == "default"
    assert rows["select"].value == (
        "guests web* and guest label tier=web and host label rack=a1"
        " and memory of 1.0 GiB or more and memory below 64 GiB"
    )
    assert rows["converge.rules.0"].meaning == (
        "long: in pass 3 or later and 80 % or more of the last pass dirty again"
        " and pre-copy would resend 10 % of the first pass or more"
    )
    assert rows["converge.rules.0"].where == "mine.yaml:22"
    assert all(one.value and one.meaning for one in rows.values())


def test_a_policy_as_json_has_plain_numbers_and_no_empty_conditions() -> None:
    made = explain.as_json(policy(GOOD))

    assert made["limits"]["bandwidth"] == 125_000_000
    assert made["rules"][1] == {
        "name": "rule 2",
        "when": {
            "stalled_for": 20.0, "time_share": 0.8, "remaining_above": 1 << 20,
            "remaining_below": 1 << 30,
        },
        "do": {"start_postcopy": {}},
    }  # fmt: skip
    assert made["rules"][2]["do"] == {
        "auto_converge": {"how": {"initial": 20, "increment": 10, "at_most": 60}}
    }


def test_a_rule_without_conditions_always_holds() -> None:
    assert explain.condition_text(policy(GOOD).rules[3].when) == "always"


def test_explain_says_when_where_and_what_stays() -> None:
    rows = {one.key: one for one in explain.values(policy(LEAST + SCHEDULES))}

    assert rows["snapshots.0"].value == "every 15min, disks only, into the first store"
    assert rows["snapshots.1"].value == (
        "daily 03:00, memory and disks, into near (keeps 3 last, 7 daily);"
        " copied to far (keeps 12 monthly); copied to farther; verified every 7d (deep)"
    )
    assert rows["snapshots.1"].where == "mine.yaml:7"
    assert "assuming one failure in 10d" in rows["snapshots.2"].value
    assert {one.key: one.value for one in explain.values(policy())}["snapshots"] == "none"


def test_as_json_a_schedule_says_its_time_as_it_was_written() -> None:
    made = explain.as_json(policy(LEAST + SCHEDULES))["snapshots"]

    assert [one["when"] for one in made] == ["every 15min", "daily 03:00", "every auto"]
    assert made[1]["copies"][0] == {
        "store": "far",
        "keep": {"last": 0, "hourly": 0, "daily": 0, "weekly": 0, "monthly": 12},
    }


def test_the_choice_is_told_in_one_line_for_each_policy() -> None:
    assert explain.choice(chosen(LADDER[5])) == (
        "host, because the host's label rack is a1",
        "not balanced: host matches more host labels",
        "not wan: it is used only if requested by name",
    )
