"""The one table of what can be done from the dashboard. Pure.

Each action is a command that people could type; the dashboard shows it before it runs it. Help, the
footer, the command palette and the questions are all made from this table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from vmckpt_tui.scene import Scene, Where
from vmckpt_tui.words import host_in_words

Words = tuple[str, ...]
"""A command, without "vmckpt"."""
Answers = Mapping[str, str]
"""What was filled in, by the field's name; what was left out is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Something to be filled in."""

    name: str
    label: str
    choices: tuple[tuple[str, str], ...] | None = None
    """What is shown and what it means; None: free text."""
    value: str = ""
    """To begin with."""
    needed: bool = True
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing to do."""

    name: str
    key: str
    label: str
    """In the footer."""
    help: str
    where: tuple[Where, ...]
    fits: Callable[[Scene], str | None]
    """Why it cannot be done now; None: it can."""
    run: Callable[[Scene, Answers], tuple[Words, ...]] | None = None
    """What is done: commands one after the other. None: it only looks."""
    look: Callable[[Scene, Answers], Words | None] = lambda _scene, _answers: None
    """What shows beforehand what would come of it."""
    fields: Callable[[Scene], tuple[Field, ...]] = lambda _scene: ()
    costs: Callable[[Scene, Answers], str | None] = lambda _scene, _answers: None
    """What is lost or at stake, in numbers. Then it is asked, and the answer is no by itself."""
    shown: bool = True
    """Whether it has a place in the footer."""
    of_host: bool = False
    """It is about a host and not about guests."""
    of_store: bool = False
    """It is about a store and not about single snapshots."""
    local: bool = False
    """The dashboard does it itself; there is no command."""


def missing(action: Action, scene: Scene, answers: Answers) -> str | None:
    """What is still to be filled in."""
    for one in action.fields(scene):
        if one.needed and not answers.get(one.name):
            return f"{one.label}?"
    return None


def fits(action: Action, scene: Scene) -> str | None:
    """Why an action cannot be done now; None: it can."""
    if scene.where not in action.where:
        return "not here"
    if action.run is not None and scene.model.read_only:
        return "only looking is allowed"
    return action.fits(scene)


def about(action: Action, scene: Scene) -> str:
    """What it would be done to, in a few words."""
    if action.of_host:
        return "" if scene.host is None else scene.host.name
    if action.of_store and scene.snapshots:
        return f"in {scene.snapshots[0].store}"
    if scene.job is not None:
        return f"{scene.job.operation.id} {scene.job.operation.guest}"
    if scene.entry is not None:
        return str(scene.entry["guest"])
    names = [one.name for one in scene.guests] or [one.name or one.id for one in scene.snapshots]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}" if names else scene.policy or ""


def of(table: Sequence[Action], where: Where) -> Sequence[Action]:
    """Those of one part."""
    return [one for one in table if where in one.where]


def line(words: Words) -> str:
    """As it is typed."""
    return " ".join(("vmckpt", *(_quoted(word) for word in words)))


def _quoted(word: str) -> str:
    if word and all(one.isalnum() or one in "-_./:=,@+%" for one in word):
        return word
    return "'" + word.replace("'", "'\\''") + "'"


def option(name: str, answers: Answers, key: str) -> Words:
    """An option with what was filled in, or nothing."""
    value = answers.get(key)
    return (name, value) if value else ()


def target(scene: Scene, label: str = "to host") -> Field:
    """To which host; the freest one, unless somebody says otherwise."""
    open_ = scene.open_hosts()
    choices = tuple((host_in_words(one), one.name) for one in open_)
    return Field(name="to", label=label, choices=choices, value=open_[0].name if open_ else "")


def policy(scene: Scene, own: str = "each guest's own") -> Field:
    """By which policy."""
    choices = ((own, ""), *((name, name) for name in scene.model.policies))
    return Field(name="policy", label="policy", choices=choices, needed=False)
