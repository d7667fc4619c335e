"""What several guests of a group tell of their progress, as one."""

from collections.abc import Callable
from dataclasses import replace

from vmckpt.model.events import Caller, Copied, Event
from vmckpt.snapshot import group


def listening(caller: Caller) -> Callable[[str], Caller]:
    """Makes one, by the name of a member, who hears of it; `caller` is told of all together."""
    progress: dict[str, Copied] = {}

    def of(name: str) -> Caller:
        def emit(event: Event) -> None:
            if isinstance(event, Copied):
                progress[name] = event
                caller.emit(group.together(list(progress.values())))

        return replace(caller, emit=emit)

    return of
