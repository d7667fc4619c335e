"""Actions on protections. Pure."""

from collections.abc import Mapping
from typing import Any

from vmckpt.protection import status
from vmckpt.protection.status import Look
from vmckpt.replication.status import Phase
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
    entry: Mapping[str, Any] = scene.entry or {}
    guest, primary, backup = (entry.get(one) for one in ("guest", "primary", "backup"))
    if seen is not None and seen.phase == Phase.ALONE:
        return (
            f"{guest} is running unprotected on {primary}: if it resumes on {backup} from its last"
            " epoch, all later work is lost, including output that clients have received"
        )
    resumes = f"{guest} will resume on {backup} from its last epoch"
    if seen is None or seen.behind_s is None:
        return (
            f"{resumes}: an unknown amount of its work on {primary} is lost; if it ran unprotected"
            " there, this includes output that clients have received"
        )
    return (
        f"{resumes}: the last {show_seconds(seen.behind_s)} of its work on {primary} is lost, none"
        " of which was externally visible"
    )


def _cost_of_switch(scene: Scene, _: Answers) -> str:
    seen = _seen(scene)
    epoch = None if seen is None else seen.pause_s
    paused = "" if epoch is None else f" for longer than in an epoch ({show_seconds(epoch)})"
    return f"the guest is paused{paused} and loses nothing, but then has no standby"


def _cost_of_end(scene: Scene, _: Answers) -> str:
    entry: Mapping[str, Any] = scene.entry or {}
    return f"the standby on {entry.get('backup')} is removed; a new standby needs a complete copy"


_DEAD = Field(
    name="dead", label="the host", needed=False,
    choices=(("is dead, according to the lease or its fence agent", ""),
             ("is off: I have verified this", "--host-is-off"),
             ("is to be powered off first, by its fence agent", "--fence")),
)  # fmt: skip


def _failover(scene: Scene, *how: str) -> tuple[Words, ...]:
    return (("failover", _guest(scene), *how),)


ON_PROTECTION = (
    Action(
        name="watch", key="o", label="Open", where=_HERE, local=True, shown=False, fits=_some,
        help="Open the protection to watch it",
    ),
    Action(
        name="failover", key="f", label="Failover", where=_HERE, fits=_some,
        help="Fail over to the standby, if the guest's host is dead", costs=_cost_of_failover,
        fields=lambda _: (_DEAD,),
        run=lambda scene, answers: _failover(scene, *filter(None, [answers.get("dead")])),
    ),
    Action(
        name="switch", key="w", label="Switch", where=_HERE, fits=_ready,
        help="Switch to the standby without loss, while both hosts are up", costs=_cost_of_switch,
        run=lambda scene, _: _failover(scene, "--planned"),
    ),
    Action(
        name="test", key="t", label="Test", where=_HERE,
        fits=lambda scene: (
            _ready(scene) or ("a failover test is running" if _trial(scene) else None)
        ),
        help="Start a test copy of the standby without network; the guest is not affected",
        run=lambda scene, _: _failover(scene, "--test"),
    ),
    Action(
        name="end-test", key="T", label="End test", where=_HERE,
        fits=lambda scene: None if _trial(scene) else "no failover test is running",
        help="Destroy the test copy", run=lambda scene, _: _failover(scene, "--end-test"),
    ),
    Action(
        name="unprotect", key="u", label="Unprotect", where=_HERE, fits=_some,
        help="End the protection; the guest keeps running", costs=_cost_of_end,
        run=lambda scene, _: (("unprotect", _guest(scene)),),
    ),
)  # fmt: skip
