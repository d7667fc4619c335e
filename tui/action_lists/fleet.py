"""Actions on guests and hosts. Pure."""

from vmckpt.model.guest import GuestState
from vmckpt.units import show_bytes, show_count
from vmckpt_tui.actions import Action, Answers, Field, Scene, Where, Words, option, policy, target

_FLEET = (Where.FLEET,)


def _names(scene: Scene) -> str:
    return ",".join(scene.called(one) for one in scene.guests)


def _guests(scene: Scene) -> str | None:
    return None if scene.guests else "no guest is selected"


def _one_guest(scene: Scene) -> str | None:
    return None if len(scene.guests) == 1 else "select one guest"


def _can_move(scene: Scene) -> str | None:
    if (why := _guests(scene)) is not None:
        return why
    for guest in scene.guests:
        if (job := scene.busy(guest)) is not None:
            return f"{guest.name} is locked by job {job.operation.id}"
        if scene.protected(guest) is not None:
            return f"{guest.name} is protected"
        if guest.state in (GuestState.STANDBY, GuestState.TEST):
            return f"{guest.name} is a {guest.state} copy"
    return None if scene.open_hosts() else "no other host accepts guests"


def _migrate(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    more = ("--to", answers.get("to", ""), *option("--policy", answers, "policy"))
    return tuple(("migrate", scene.called(one), *more) for one in scene.guests)


def _plan(scene: Scene, answers: Answers) -> Words | None:
    guest = scene.guest
    if guest is None or not answers.get("to"):
        return None
    return ("plan", scene.called(guest), "--to", answers["to"],
            *option("--policy", answers, "policy"))  # fmt: skip


def _can_protect(scene: Scene) -> str | None:
    return _one_guest(scene) or _can_move(scene)


def _protect(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    return tuple(
        ("protect", scene.called(one), "--to", answers.get("to", ""),
         *option("--policy", answers, "policy"))
        for one in scene.guests
    )  # fmt: skip


def _snapshot(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    more = (*option("--name", answers, "name"),
            *(("--no-memory",) if answers.get("memory") == "no" else ()))  # fmt: skip
    if len(scene.guests) > 1:
        return (("snapshot", "create", "--group", _names(scene), *more),)
    return tuple(("snapshot", "create", scene.called(one), *more) for one in scene.guests)


def _snapshot_fields(scene: Scene) -> tuple[Field, ...]:
    name = Field(name="name", label="name", needed=False, hint="default: the current time")
    if len(scene.guests) > 1:  # a consistent cut always includes memory
        return (name,)
    choices = (("memory and disks", "yes"), ("disks only", "no"))
    return (name, Field(name="memory", label="memory", choices=choices, value="yes"))


def _host(scene: Scene) -> str | None:
    return None if scene.host is not None else "no host is selected"


def _name(scene: Scene) -> str:
    return "" if scene.host is None else scene.host.name


def _on_it(scene: Scene) -> str:
    here = [one for one in scene.model.fleet.guests if one.host == _name(scene)]
    active = [one for one in here if one.state.is_active]
    memory = show_bytes(sum(one.memory for one in active))
    others = show_count(len(here) - len(active), "other guest")
    return f"{show_count(len(active), 'active guest')} ({memory}) and {others}"


def _evacuate(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    why = option("--why", answers, "why")
    return (("evacuate", _name(scene), *option("--policy", answers, "policy"), *why, "--yes"),)


def _enter(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    return (("maintenance", "enter", _name(scene), *option("--why", answers, "why")),)


def _closed(scene: Scene) -> str | None:
    if scene.host is None:
        return "no host is selected"
    return None if scene.host.closed is not None else f"{scene.host.name} is not in maintenance"


def _open(scene: Scene) -> str | None:
    if scene.host is None:
        return "no host is selected"
    return None if scene.host.closed is None else f"{scene.host.name} is already in maintenance"


_WHY = Field(name="why", label="reason", needed=False, hint="shown by vmckpt maintenance list")

ON_FLEET = (
    Action(
        name="migrate", key="m", label="Migrate", where=_FLEET, fits=_can_move,
        help="Move the marked guests to another host, one after the other",
        fields=lambda scene: (target(scene), policy(scene)), look=_plan, run=_migrate,
    ),
    Action(
        name="protect", key="p", label="Protect", where=_FLEET, fits=_can_protect,
        help="Keep a standby of a guest on another host",
        fields=lambda scene: (target(scene, "standby on"), policy(scene, "its own")),
        look=lambda scene, answers: (*_protect(scene, answers)[0], "--dry-run"), run=_protect,
    ),
    Action(
        name="snapshot", key="s", label="Snapshot", where=_FLEET, fits=_guests,
        help="Take a snapshot of a guest, or a consistent snapshot of all marked guests",
        fields=_snapshot_fields, run=_snapshot,
    ),
    Action(
        name="evacuate", key="e", label="Evacuate", where=_FLEET, of_host=True, fits=_host,
        help="Move all guests off the host",
        fields=lambda scene: (policy(scene), _WHY), run=_evacuate,
        look=lambda scene, answers: ("evacuate", _name(scene),
                                     *option("--policy", answers, "policy"), "--dry-run"),
        costs=lambda scene, _: (
            f"{_name(scene)} has {_on_it(scene)}; the plan shows which of them will be moved"
        ),
    ),
    Action(
        name="explain", key="x", label="Explain", where=_FLEET, fits=_one_guest,
        help="Show which policy applies to a guest, and why",
        look=lambda scene, _: ("policy", "explain", _names(scene)),
    ),
    Action(
        name="repopulate", key="r", label="Repopulate", where=_FLEET, fits=_closed, of_host=True,
        shown=False,
        help="Move evacuated guests back to the host and end its maintenance",
        look=lambda scene, _: ("repopulate", _name(scene), "--dry-run"),
        run=lambda scene, _: (("repopulate", _name(scene), "--yes"),),
    ),
    Action(
        name="balance", key="b", label="Balance", where=_FLEET, fits=lambda _: None, shown=False,
        help="Balance the load across hosts; migrate guests only where it pays off",
        look=lambda *_: ("balance", "--dry-run"), run=lambda *_: (("balance", "--yes"),),
        costs=lambda *_: "all migrations listed below will be performed",
    ),
    Action(
        name="close", key="c", label="Maintenance", where=_FLEET, fits=_open, of_host=True,
        shown=False,
        help="Put the host into maintenance, so that no guest is placed on it",
        fields=lambda _: (_WHY,), run=_enter,
    ),
    Action(
        name="reopen", key="C", label="Leave maintenance", where=_FLEET, fits=_closed, of_host=True,
        shown=False,
        help="Take the host out of maintenance, so that guests can be placed on it",
        run=lambda scene, _: (("maintenance", "leave", _name(scene)),),
    ),
    Action(
        name="label", key="l", label="Label", where=_FLEET, fits=_one_guest, shown=False,
        help="Set or remove a label of a guest; policies can select guests by label",
        fields=lambda _: (Field(name="label", label="label", hint="KEY=VALUE, or KEY- to remove"),),
        run=lambda scene, answers: (("label", _names(scene), answers.get("label", "")),),
    ),
    Action(
        name="prepare", key="P", label="Prepare", where=_FLEET, fits=_one_guest, shown=False,
        help="Prepare a guest for fast snapshots and replication",
        look=lambda scene, _: ("prepare", _names(scene), "--dry-run"),
        run=lambda scene, _: (("prepare", _names(scene), "--yes"),),
    ),
    Action(
        name="examine", key="d", label="Doctor", where=_FLEET, fits=_host, of_host=True,
        shown=False,
        help="Check that the host has everything that migrations need",
        look=lambda scene, _: ("doctor", _name(scene)),
    ),
)  # fmt: skip
