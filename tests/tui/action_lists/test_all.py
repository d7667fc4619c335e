"""Every action of the table, from its key to the command that runs."""

import pytest
from textual.widgets import Button, Input, Select

from tests.support.dashboards import at_row, dashboard
from tests.tui.still import Still
from vmckpt_tui.action_lists.all import TABLE
from vmckpt_tui.screens import confirm
from vmckpt_tui.screens.confirm import Order

U = "00000000-0000-4000-8000-00000000000"
# Name: the part, the row, what is filled in, what it looks up, and what it runs.
ACTS: dict[str, tuple[str, str, dict[str, str], str | None, str | None]] = {
    "migrate": ("fleet", "web1", {}, "plan web1 --to gamma", "migrate web1 --to gamma"),
    "protect": ("fleet", "web1", {"to": "beta"}, "protect web1 --to beta --dry-run",
                "protect web1 --to beta"),
    "snapshot": ("fleet", "web1", {"name": "mine"}, None, "snapshot create web1 --name mine"),
    "evacuate": ("fleet", "web1", {"why": "dust"}, "evacuate alpha --dry-run",
                 "evacuate alpha --why dust --yes"),
    "explain": ("fleet", "web1", {}, "policy explain web1", None),
    "repopulate": ("fleet", "host delta", {}, "repopulate delta --dry-run",
                   "repopulate delta --yes"),
    "balance": ("fleet", "web1", {}, "balance --dry-run", "balance --yes"),
    "close": ("fleet", "host beta", {}, None, "maintenance enter beta"),
    "reopen": ("fleet", "host delta", {}, None, "maintenance leave delta"),
    "label": ("fleet", "web1", {"label": "a=b"}, None, "label web1 a=b"),
    "prepare": ("fleet", "web1", {}, "prepare web1 --dry-run", "prepare web1 --yes"),
    "examine": ("fleet", "host beta", {}, "doctor beta", None),
    "bandwidth": ("jobs", "m-7k3f", {"bandwidth": "9MiB/s"}, None,
                  "set m-7k3f --bandwidth 9MiB/s"),
    "downtime": ("jobs", "m-7k3f", {"downtime": "1s"}, None, "set m-7k3f --max-downtime 1s"),
    "postcopy": ("jobs", "m-7k3f", {}, None, "postcopy m-7k3f"),
    "cancel": ("jobs", "e-4b7x", {}, None, "cancel e-4b7x"),
    "pause": ("jobs", "e-4b7x", {}, None, "pause e-4b7x"),
    "resume": ("jobs", "m-brok", {}, None, "resume m-brok"),
    "details": ("jobs", "m-7k3f", {}, "job m-7k3f", None),
    "recover": ("jobs", "m-7k3f", {}, "recover --dry-run", "recover"),
    "failover": ("guard", "p-9abc", {}, None, f"failover {U}6"),
    "switch": ("guard", "p-9abc", {}, None, f"failover {U}6 --planned"),
    "test": ("guard", "p-9abc", {}, None, f"failover {U}6 --test"),
    "end-test": ("guard", "p-9abc", {}, None, f"failover {U}6 --end-test"),
    "unprotect": ("guard", "p-9abc", {}, None, f"unprotect {U}6"),
    "create": ("snapshots", "main s-aaa", {}, None, f"snapshot create {U}1 --store main"),
    "restore": ("snapshots", "main s-bbb", {}, "snapshot show s-bbb --store main",
                "snapshot restore s-bbb --replace --store main"),
    "fork": ("snapshots", "main s-bbb", {"name": "twin"}, None,
             "snapshot restore s-bbb --as twin --store main"),
    "diff": ("snapshots", "main s-bbb", {}, "snapshot diff s-aaa s-bbb --store main", None),
    "verify": ("snapshots", "main s-bbb", {}, None,
               "snapshot verify s-bbb --deep --store main"),
    "boot": ("snapshots", "main s-bbb", {}, None, "snapshot verify s-bbb --boot --store main"),
    "show": ("snapshots", "main s-bbb", {}, "snapshot show s-bbb --store main", None),
    "prune": ("snapshots", "main s-bbb", {"last": "3"},
              "snapshot prune --keep-last 3 --schedule nightly --store main --dry-run",
              "snapshot prune --keep-last 3 --schedule nightly --store main --yes"),
    "schedule": ("snapshots", "main s-bbb", {}, "run --dry-run --once", None),
    "pin": ("snapshots", "main s-bbb", {}, None, "snapshot pin s-bbb --store main"),
    "unpin": ("snapshots", "main s-ccc", {}, None, "snapshot unpin s-ccc --store main"),
    "delete": ("snapshots", "main s-bbb", {}, None, "snapshot delete s-bbb --yes --store main"),
    "gc": ("snapshots", "main s-bbb", {}, "snapshot gc --dry-run --store main",
           "snapshot gc --store main"),
    "show-policy": ("policies", "balanced", {}, "policy show balanced", None),
    "explain-guest": ("policies", "balanced", {"guest": "db1"}, "policy explain db1", None),
    "check-file": ("policies", "balanced", {"file": "a.yaml"}, "policy check a.yaml", None),
    "replay": ("policies", "balanced", {"trace": "t.jsonl"},
               "policy replay t.jsonl --policy balanced", None),
}  # fmt: skip
HARMFUL = {
    "balance", "evacuate", "gc", "postcopy", "cancel", "failover", "switch", "unprotect", "restore",
    "prune", "delete",
}  # fmt: skip


def test_every_action_is_tried() -> None:
    assert set(ACTS) == {one.name for one in TABLE if not one.local}


@pytest.fixture(autouse=True)
def restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody types: what would come of it is looked up at once."""
    monkeypatch.setattr(confirm, "_REST", 0.0)


@pytest.mark.parametrize("name", ACTS)
async def test_from_the_key_to_the_command(name: str) -> None:
    part, row, answers, look, runs = ACTS[name]
    action = next(one for one in TABLE if one.name == name)
    still = Still()
    if name == "end-test":
        still.entries["p-9abc"]["says"]["beta"]["test"] = {"runs": True}
    app = dashboard(still)
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, part, row)
        await pilot.press(action.key)
        await pilot.pause()
        assert isinstance(app.screen, Order), app.model.trouble
        for field, value in answers.items():
            asked = app.screen.query_one(f"#field-{field}")
            assert isinstance(asked, Input | Select)
            asked.value = value
        await pilot.pause(0.05)
        if look is not None:
            assert " ".join(still.asked[-1]) == look
        if name in HARMFUL:
            assert app.screen.query_one("#cost").display
        if runs is None:
            await pilot.press("escape")
            assert not still.begun
            return
        if not action.fields(app.screen._scene):
            focused = app.screen.focused
            assert focused is not None
            assert focused.id == ("no" if name in HARMFUL else "yes")
        yes = app.screen.query_one("#yes", Button)
        for _ in range(100):
            if not yes.disabled:
                break
            await pilot.pause(0.05)
        yes.press()
        await pilot.pause()
    assert [" ".join(one.words) for one in still.begun] == [runs]


@pytest.mark.parametrize("name", sorted(name for name in HARMFUL if not ACTS[name][2]))
async def test_what_destroys_is_not_done_by_enter_alone(name: str) -> None:
    part, row, _, _, _ = ACTS[name]
    action = next(one for one in TABLE if one.name == name)
    still = Still()
    app = dashboard(still)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.pause()
        await at_row(app, pilot, part, row)
        await pilot.press(action.key)
        await pilot.pause()
        assert isinstance(app.screen, Order)
        await pilot.press("enter")
        await pilot.pause()
        assert not isinstance(app.screen, Order) or action.fields(app.screen._scene)
    assert not still.begun
