"""Actions on snapshots. Pure."""

from vmckpt.model.guest import SnapshotNow
from vmckpt.units import show_bytes, show_count
from vmckpt_tui.actions import Action, Answers, Field, Scene, Where, Words, option

_HERE = (Where.SNAPSHOTS,)
_KEPT = tuple(
    Field(name=name, label=f"keep {name}", needed=False, hint="how many")
    for name in ("last", "hourly", "daily", "weekly", "monthly")
)


def _some(scene: Scene) -> str | None:
    if not all(one.id for one in scene.snapshots) or not scene.snapshots:
        return "no snapshot is selected"
    stores = {one.store for one in scene.snapshots}
    return (
        None
        if len(stores) == 1
        else f"the selected snapshots are in several stores: {', '.join(sorted(stores))}"
    )


def _one(scene: Scene) -> str | None:
    return _some(scene) or ("select one snapshot" if len(scene.snapshots) > 1 else None)


def _first(scene: Scene) -> SnapshotNow:
    return scene.snapshots[0] if scene.snapshots else SnapshotNow(id="", name="", store="")


def _in(scene: Scene) -> Words:
    return ("--store", _first(scene).store)


def _ids(scene: Scene) -> Words:
    return tuple(one.id for one in scene.snapshots)


def _two(scene: Scene) -> str | None:
    if (why := _some(scene)) is not None:
        return why
    if len(scene.snapshots) == 2 or (len(scene.snapshots) == 1 and _first(scene).parent):
        return None
    return "mark two snapshots, or select one that has a parent"


def _diff(scene: Scene, _: Answers) -> Words:
    if len(scene.snapshots) == 2:
        older, newer = sorted(scene.snapshots, key=lambda one: one.made_at)
        return ("snapshot", "diff", older.id, newer.id, *_in(scene))
    first = _first(scene)
    return ("snapshot", "diff", first.parent or "", first.id, *_in(scene))


def _hosts(scene: Scene) -> Field:
    names = tuple((one.name, one.name) for one in scene.model.fleet.hosts if one.error is None)
    return Field(name="on", label="on host", choices=(("the host where it was taken", ""), *names),
                 needed=False)  # fmt: skip


def _restore(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    first = _first(scene)
    what = first.group if answers.get("group") == "yes" and first.group else first.id
    return (
        ("snapshot", "restore", what, *option("--on", answers, "on"), "--replace", *_in(scene)),
    )


def _restore_fields(scene: Scene) -> tuple[Field, ...]:
    if _first(scene).group is None:
        return (_hosts(scene),)
    choices = (("this guest", "no"), ("its whole group", "yes"))
    return (Field(name="group", label="what", choices=choices, value="no"), _hosts(scene))


def _cost_of_restore(scene: Scene, answers: Answers) -> str:
    first = _first(scene)
    if answers.get("group") == "yes" and first.group:
        whole = [
            one for one in scene.model.snapshots
            if (one.group, one.store) == (first.group, first.store)
        ]  # fmt: skip
        names = ", ".join(sorted(one.guest for one in whole))
        disks = show_bytes(sum(one.disks for one in whole))
        return (
            f"{names} are stopped if they are running, and their disks ({disks}) are overwritten:"
            " changes since the snapshots are lost"
        )
    later = sum(
        one.guest_uuid == first.guest_uuid and one.made_at > first.made_at
        for one in scene.model.snapshots
    )
    return (
        f"{first.guest} is stopped if it is running, and its disks ({show_bytes(first.disks)}) are"
        " overwritten: changes since the snapshot are lost, except those in"
        f" {show_count(later, 'later snapshot')}"
    )


def _fork(scene: Scene, answers: Answers) -> tuple[Words, ...]:
    return (("snapshot", "restore", _first(scene).id, "--as", answers.get("name", ""),
             *option("--on", answers, "on"), *_in(scene)),)  # fmt: skip


def _cost_of_delete(scene: Scene, _: Answers) -> str:
    found = [one for one in scene.snapshots if one.id]
    own = show_bytes(sum(one.new for one in found))
    return (
        f"permanently delete {show_count(len(found), 'snapshot')}, which added {own} to the store;"
        " gc frees the part that no other snapshot needs"
    )


def _prune(scene: Scene, answers: Answers) -> Words:
    kept = [
        word for one in _KEPT for word in option(f"--keep-{one.name}", answers, one.name)
    ]  # fmt: skip
    return ("snapshot", "prune", *kept, *option("--schedule", answers, "schedule"), *_in(scene))


def _made_by_schedule(scene: Scene) -> list[str]:
    store = _first(scene).store
    found = {one.schedule for one in scene.model.snapshots if one.store == store and one.schedule}
    return sorted(found)


def _prune_fields(scene: Scene) -> tuple[Field, ...]:
    names = _made_by_schedule(scene)
    if not names:
        return _KEPT
    choices, own = tuple((name, name) for name in names), _first(scene).schedule
    value = own if own in names else names[0]
    return (Field(name="schedule", label="schedule", choices=choices, value=value), *_KEPT)


def _scheduled(scene: Scene) -> str | None:
    if (why := _some(scene)) is not None:
        return why
    return None if _made_by_schedule(scene) else "no snapshot in this store was taken by a schedule"


def _pinned(scene: Scene, *, wanted: bool) -> str | None:
    if (why := _one(scene)) is not None:
        return why
    if _first(scene).pinned is wanted:
        return None
    return "the snapshot is not pinned" if wanted else "the snapshot is already pinned"


ON_SNAPSHOTS = (
    Action(
        name="create", key="s", label="Snapshot", where=_HERE, fits=_one,
        help="Take a new snapshot of the same guest",
        fields=lambda _: (Field(name="name", label="name", needed=False, hint="default: now"),),
        run=lambda scene, answers: (
            ("snapshot", "create", _first(scene).guest_uuid, *option("--name", answers, "name"),
             *_in(scene)),),
    ),
    Action(
        name="restore", key="r", label="Restore", where=_HERE, fits=_one,
        help="Restore the guest's disks and memory from the snapshot", fields=_restore_fields,
        look=lambda scene, _: ("snapshot", "show", _first(scene).id, *_in(scene)),
        run=_restore, costs=_cost_of_restore,
    ),
    Action(
        name="fork", key="f", label="Fork", where=_HERE, fits=_one,
        help="Restore the snapshot as a new guest, with its network links down",
        fields=lambda scene: (Field(name="name", label="name"), _hosts(scene)), run=_fork,
    ),
    Action(
        name="diff", key="d", label="Diff", where=_HERE, fits=_two, look=_diff,
        help="Show what changed between two marked snapshots, or since the parent",
    ),
    Action(
        name="verify", key="v", label="Verify", where=_HERE, fits=_some,
        help="Verify that snapshots are complete and intact, down to every chunk",
        run=lambda scene, _: (("snapshot", "verify", *_ids(scene), "--deep", *_in(scene)),),
    ),
    Action(
        name="boot", key="V", label="Boot", where=_HERE, fits=_one, shown=False,
        help="Verify the snapshot by booting it as a test guest without network",
        run=lambda scene, _: (("snapshot", "verify", *_ids(scene), "--boot", *_in(scene)),),
    ),
    Action(
        name="show", key="x", label="Show", where=_HERE, fits=_one, shown=False,
        help="Show the metadata of the snapshot",
        look=lambda scene, _: ("snapshot", "show", _first(scene).id, *_in(scene)),
    ),
    Action(
        name="prune", key="p", label="Prune", where=_HERE, fits=_scheduled, of_store=True,
        help="Show and then delete the snapshots of a schedule that no rule keeps",
        fields=_prune_fields,
        look=lambda scene, answers: (*_prune(scene, answers), "--dry-run"),
        run=lambda scene, answers: ((*_prune(scene, answers), "--yes"),),
        costs=lambda *_: "the deletions listed below cannot be undone",
    ),
    Action(
        name="schedule", key="w", label="Schedule", where=_HERE, fits=lambda _: None, shown=False,
        help="Show what vmckpt run would do now, and when each guest is due",
        look=lambda *_: ("run", "--dry-run", "--once"),
    ),
    Action(
        name="pin", key="i", label="Pin", where=_HERE, shown=False,
        fits=lambda scene: _pinned(scene, wanted=False), help="Protect the snapshot from deletion",
        fields=lambda _: (Field(name="why", label="reason", needed=False),),
        run=lambda scene, answers: (
            ("snapshot", "pin", _first(scene).id, *option("--why", answers, "why"), *_in(scene)),),
    ),
    Action(
        name="unpin", key="I", label="Unpin", where=_HERE, shown=False,
        fits=lambda scene: _pinned(scene, wanted=True), help="Allow the deletion of the snapshot",
        run=lambda scene, _: (("snapshot", "unpin", _first(scene).id, *_in(scene)),),
    ),
    Action(
        name="delete", key="D", label="Delete", where=_HERE, fits=_some, shown=False,
        help="Delete the marked snapshots", costs=_cost_of_delete,
        run=lambda scene, _: (("snapshot", "delete", *_ids(scene), "--yes", *_in(scene)),),
    ),
    Action(
        name="gc", key="g", label="Collect", where=_HERE, fits=_some, shown=False, of_store=True,
        help="Remove objects that no snapshot of the store needs",
        look=lambda scene, _: ("snapshot", "gc", "--dry-run", *_in(scene)),
        run=lambda scene, _: (("snapshot", "gc", *_in(scene)),),
        costs=lambda *_: "the deletions listed below cannot be undone",
    ),
)  # fmt: skip
