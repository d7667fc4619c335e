"""The table of all actions, including those on policies and the health of hosts. Pure."""

from vmckpt_tui.action_lists.fleet import ON_FLEET
from vmckpt_tui.action_lists.jobs import ON_JOBS
from vmckpt_tui.action_lists.protection import ON_PROTECTION
from vmckpt_tui.action_lists.snapshots import ON_SNAPSHOTS
from vmckpt_tui.actions import Action, Field, Scene, Where

_POLICIES = (Where.POLICIES,)
_TRACE = Field(name="trace", label="trace", hint="file written by vmckpt migrate --trace")
_GUEST = Field(name="guest", label="guest", hint="name of the guest")


def _policy(scene: Scene) -> str | None:
    return None if scene.policy else "no policy is selected"


def _always(_: Scene) -> None:
    return None


_MORE = (
    Action(
        name="show-policy", key="s", label="Show", where=_POLICIES, fits=_policy,
        help="Show every value of a policy, and where it is set",
        look=lambda scene, _: ("policy", "show", scene.policy or ""),
    ),
    Action(
        name="explain-guest", key="x", label="Explain", where=_POLICIES, fits=_always,
        help="Show which policy applies to a guest, and why", fields=lambda _: (_GUEST,),
        look=lambda _, answers: ("policy", "explain", answers["guest"])
        if answers.get("guest") else None,
    ),
    Action(
        name="check-file", key="c", label="Check", where=_POLICIES, fits=_always,
        help="Check a policy file and show all problems",
        fields=lambda _: (Field(name="file", label="file", hint="like policies/own.yaml"),),
        look=lambda _, answers: ("policy", "check", answers["file"])
        if answers.get("file") else None,
    ),
    Action(
        name="replay", key="y", label="Replay", where=_POLICIES, fits=_policy,
        help="Show what this policy would have decided in a recorded migration",
        fields=lambda _: (_TRACE,),
        look=lambda scene, answers: ("policy", "replay", answers["trace"],
                                     "--policy", scene.policy or "")
        if answers.get("trace") else None,
    ),
    Action(
        name="look-again", key="r", label="Examine", where=(Where.DOCTOR,), fits=_always,
        local=True, help="Check all hosts again",
    ),
)  # fmt: skip
TABLE = (*ON_FLEET, *ON_JOBS, *ON_PROTECTION, *ON_SNAPSHOTS, *_MORE)
"""All actions, in the order of the footer."""
BY_NAME = {one.name: one for one in TABLE}
