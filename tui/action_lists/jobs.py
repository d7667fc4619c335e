"""Actions on jobs. Pure."""

from vmckpt.model.migration import JobPhase
from vmckpt.units import show_bytes
from vmckpt_tui.actions import Action, Answers, Field, Scene, Where, Words, is_move, is_whole

_ANY = (Where.JOBS, Where.MOVE, Where.DRAIN)
_MOVE = (Where.JOBS, Where.MOVE)
_LATE = (JobPhase.POST_COPY, JobPhase.POST_COPY_PAUSED)
_RATE = Field(name="bandwidth", label="bandwidth", hint="like 200MiB/s, 1gbit, or unlimited")
_DOWNTIME = Field(name="downtime", label="maximum downtime", hint="like 300ms")


def _id(scene: Scene) -> str:
    return "" if scene.job is None else scene.job.operation.id


def _active(scene: Scene) -> str | None:
    if scene.job is None:
        return "no job is selected"
    if not scene.job.operation.active:
        return "the job has ended"
    if not is_move(scene.job) and not is_whole(scene.job):
        return f"a job of kind {scene.job.operation.kind} accepts no requests"
    return None


def _moves(scene: Scene) -> str | None:
    if (why := _active(scene)) is not None:
        return why
    return None if is_move(scene.job) else "the job moves several guests"


def _phase(scene: Scene) -> str | None:
    return None if scene.job is None else scene.job.operation.phase


def _pre_copy(scene: Scene) -> str | None:
    return _moves(scene) or ("already in post-copy" if _phase(scene) in _LATE else None)


def _cancel(scene: Scene) -> str | None:
    if (why := _active(scene)) is not None:
        return why
    late = is_move(scene.job) and _phase(scene) in _LATE
    return "post-copy cannot be cancelled" if late else None


def _resume(scene: Scene) -> str | None:
    if (why := _active(scene)) is not None:
        return why
    if is_whole(scene.job) or _phase(scene) == JobPhase.POST_COPY_PAUSED:
        return None
    return "a migration can be resumed only if the stream of its post-copy broke"


def _done(scene: Scene) -> str:
    return "an unknown share" if scene.done is None else f"{scene.done:.0%}"


def _cost_of_cancel(scene: Scene, _: Answers) -> str:
    if is_whole(scene.job):
        return f"{_done(scene)} is done; running migrations complete, but no more are started"
    guest = scene.job.operation.guest if scene.job is not None else ""
    return f"{_done(scene)} is done and will be discarded; {guest} stays on the source"


def _cost_of_postcopy(scene: Scene, _: Answers) -> str:
    left = "memory" if scene.remaining is None else show_bytes(scene.remaining)
    return (
        f"{left} will be fetched over the network while the guest is running on the target; the"
        " migration can then no longer be cancelled, and memory is lost if either host fails"
    )


def _cost_of_pause(scene: Scene, _: Answers) -> str | None:
    if is_whole(scene.job):
        return None
    left = "the rest of its memory" if scene.remaining is None else show_bytes(scene.remaining)
    return f"the guest will be paused until {left} has been sent"


def _word(word: str) -> tuple[tuple[str, ...], ...]:
    return ((word,),)


def _order(word: str, scene: Scene) -> tuple[Words, ...]:
    return ((word, _id(scene)),)


ON_JOBS = (
    Action(
        name="open", key="o", label="Open", where=(Where.JOBS,), local=True, shown=False,
        fits=lambda scene: None if scene.job is not None else "no job is selected",
        help="Open the job to watch its progress or see its result",
    ),
    Action(
        name="details", key="i", label="Details", where=_ANY, shown=False,
        fits=lambda scene: None if scene.job is not None else "no job is selected",
        help="Show the job in detail: report, decisions, requests",
        look=lambda scene, _: ("job", _id(scene)),
    ),
    Action(
        name="copy", key="y", label="Copy", where=_ANY, local=True, shown=False,
        fits=lambda scene: None if scene.job is not None else "no job is selected",
        help="Copy all data of the job as JSON",
    ),
    Action(
        name="bandwidth", key="b", label="Bandwidth", where=_MOVE, fits=_moves,
        help="Limit the bandwidth of a migration", fields=lambda _: (_RATE,),
        run=lambda scene, answers: (
            ("set", _id(scene), "--bandwidth", answers.get("bandwidth", "")),),
    ),
    Action(
        name="downtime", key="d", label="Downtime", where=_MOVE, fits=_pre_copy,
        help="Set the maximum downtime of a migration", fields=lambda _: (_DOWNTIME,),
        run=lambda scene, answers: (
            ("set", _id(scene), "--max-downtime", answers.get("downtime", "")),),
    ),
    Action(
        name="postcopy", key="t", label="Post-copy", where=_MOVE, fits=_pre_copy,
        help="Switch to post-copy: resume the guest on the target now",
        costs=_cost_of_postcopy,
        run=lambda scene, _: _order("postcopy", scene),
    ),
    Action(
        name="cancel", key="c", label="Cancel", where=_ANY, fits=_cancel,
        help="Cancel the job; a migrating guest keeps running on the source",
        costs=_cost_of_cancel, run=lambda scene, _: _order("cancel", scene),
    ),
    Action(
        name="pause", key="p", label="Pause", where=_ANY,
        fits=lambda scene: _active(scene) if is_whole(scene.job) else _pre_copy(scene),
        help="Pause a guest until its migration completes; for a host, start no more migrations",
        costs=_cost_of_pause, run=lambda scene, _: _order("pause", scene),
    ),
    Action(
        name="resume", key="r", label="Resume", where=_ANY, fits=_resume,
        help="Resume a paused job, or a post-copy migration whose stream broke",
        run=lambda scene, _: _order("resume", scene),
    ),
    Action(
        name="recover", key="R", label="Recover", where=(Where.JOBS,),
        help="Recover interrupted jobs: finish or undo them",
        fits=lambda scene: None if any(one.unattended for one in scene.model.jobs)
        else "no job is orphaned",
        look=lambda *_: ("recover", "--dry-run"), run=lambda *_: _word("recover"),
    ),
)  # fmt: skip
