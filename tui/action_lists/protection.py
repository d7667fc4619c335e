"""What can be done with protections. Pure."""

from collections.abc import Mapping
from typing import Any

from vmckpt.protection import status
from vmckpt.protection.status import Look
from vmckpt.units import show_seconds
from vmckpt_tui.actions import Action, Answers, Field, Scene, Where, Words

_HERE = (Where.PROTECTION,)


def _seen(scene: Scene) -> Look | None:
    return None if scene.entry is None else status.parse_status(scene.entry)


def _guest(scene: Scene) -> str:
    return "" if scene.entry is None else str(scene.entry["uuid"] or scene.entry["guest"])


def _some(scene: Scene) -> str | None:
    return None if scene.entry is not None else "no protection is selected"


def _ready(scene: Scene) -> str | None:
    seen = _seen(scene)
    if seen is None:
        return "no protection is selected"
    return None if seen.ready else f"the standby is not ready: {seen.ready_why}"


def _trial(scene: Scene) -> Mapping[str, Any] | None:
    if scene.entry is None:
        return None
    theirs: Mapping[str, Any] = scene.entry["says"].get(scene.entry["backup"]) or {}
    return theirs.get("test")


def _cost_of_failover(scene: Scene, _: Answers) -> str:
    seen = _seen(scene)
    behind = None if seen is None else seen.behind_s
    lost = "an unknown time" if behind is None else show_seconds(behind)
    entry: Mapping[str, Any] = scene.entry or {}
    return (
        f"{entry.get('guest')} goes on at {entry.get('backup')} from its last epoch: {lost} of what"
        f" it did on {entry.get('primary')} is lost, none of it was seen outside"
    )


def _cost_of_switch(scene: Scene, _: Answers) -> str:
    seen = _seen(scene)
    pause = "a moment" if seen is None or seen.pause_s is None else show_seconds(seen.pause_s)
    return (
        f"the guest stands still for about {pause}; nothing is lost; it has no standby after that"
    )


def _cost_of_end(scene: Scene, _: Answers) -> str:
    entry: Mapping[str, Any] = scene.entry or {}
    return f"the standby on {entry.get('backup')} is thrown away; a new one begins from nothing"


_DEAD = Field(
    name="dead", label="its host", needed=False,
    choices=(("is dead by the lease, or its agent's word", ""),
             ("is off: you know it, and say so", "--host-is-off"),
             ("is powered off first, by its fence device", "--fence")),
)  # fmt: skip


def _failover(scene: Scene, *how: str) -> tuple[Words, ...]:
    return (("failover", _guest(scene), *how),)


ON_PROTECTION = (
    Action(
        name="watch", key="o", label="Open", where=_HERE, local=True, shown=False, fits=_some,
        help="Watch the protection",
    ),
    Action(
        name="failover", key="f", label="Failover", where=_HERE, fits=_some,
        help="Let the standby take over, if the guest's host is dead", costs=_cost_of_failover,
        fields=lambda _: (_DEAD,),
        run=lambda scene, answers: _failover(scene, *filter(None, [answers.get("dead")])),
    ),
    Action(
        name="switch", key="w", label="Switch", where=_HERE, fits=_ready,
        help="Planned switch to the standby, while both hosts are well", costs=_cost_of_switch,
        run=lambda scene, _: _failover(scene, "--planned"),
    ),
    Action(
        name="test", key="t", label="Test", where=_HERE,
        fits=lambda scene: _ready(scene) or ("a test runs" if _trial(scene) else None),
        help="Run a copy of the standby without network; nothing is switched",
        run=lambda scene, _: _failover(scene, "--test"),
    ),
    Action(
        name="end-test", key="T", label="End test", where=_HERE,
        fits=lambda scene: None if _trial(scene) else "no test runs",
        help="Take the copy away again", run=lambda scene, _: _failover(scene, "--end-test"),
    ),
    Action(
        name="unprotect", key="u", label="Unprotect", where=_HERE, fits=_some,
        help="End the protection; the guest goes on", costs=_cost_of_end,
        run=lambda scene, _: (("unprotect", _guest(scene)),),
    ),
)  # fmt: skip
