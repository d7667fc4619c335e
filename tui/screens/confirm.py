"""The dialog that fills in, previews and confirms an action."""

import asyncio
from typing import ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Select, Static

from vmckpt.model.events import Commands
from vmckpt_tui import actions
from vmckpt_tui.actions import Action, Field, Scene, Words, line

_FRAME = 10
"""Number of lines in addition to the fields and the preview."""
_KEYS = 4
"""Number of lines for the buttons and the frame."""
_REST = 0.4
"""Seconds between the last change of a field and the start of the preview command."""


class Order(ModalScreen[tuple[Words, ...] | None]):
    """The dialog of an action. Dismissed with the commands to run, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "no", "Back"),
        Binding("ctrl+y", "yes", "Yes", priority=True),
    ]
    DEFAULT_CSS = """
    Order { align: center middle; }
    Order #box { width: 96%; max-width: 130; height: auto; max-height: 96%; padding: 0 1;
                 background: $surface; border: round $primary; }
    Order #content { height: auto; }
    Order .field { height: 1; margin: 1 0 0 0; }
    Order .field Label { width: 18; padding: 0 1 0 0; text-align: right; }
    Order .field Select, Order .field Input { width: 1fr; }
    Order #cost { padding: 0 1; color: $text-warning; text-style: bold; }
    Order #cost.none { display: none; }
    Order #line { padding: 0 1; color: $text-muted; }
    Order #told { height: auto; min-height: 1; padding: 0 1;
                  background: $panel; }
    Order #told.none { display: none; }
    Order #keys { height: 1; margin: 1 0 0 0; align-horizontal: right; }
    Order Button { margin: 0 1; min-width: 12; }
    Order Button:focus { text-style: bold reverse; }
    """

    def __init__(self, action: Action, scene: Scene, commands: Commands) -> None:
        super().__init__()
        self._action, self._scene, self._commands = action, scene, commands
        self._fields = action.fields(scene)
        self._answers = {one.name: one.value for one in self._fields if one.value}
        self._waits = False
        """Whether "Yes" is refused until the preview of a destructive action has arrived."""

    def compose(self) -> ComposeResult:
        acts = self._action.run is not None
        with Vertical(id="box") as box:
            about = actions.about(self._action, self._scene)
            box.border_title = Text(f"{self._action.label} {about}".rstrip()[:70])
            with VerticalScroll(id="content", can_focus=False):
                yield Label(self._action.help, markup=False)
                for one in self._fields:
                    with Horizontal(classes="field"):
                        yield Label(one.label)
                        yield _asked(one)
                yield Static("", id="cost", markup=False)
                with VerticalScroll(id="told", classes="none"):
                    yield Static("", id="text", markup=False)
                yield Static("", id="line", markup=False)
            with Horizontal(id="keys"):
                yield Button("No, back" if acts else "Back", id="no", compact=True)
                if acts:
                    yes = f"Yes, {self._action.label.lower()}"
                    yield Button(yes, id="yes", variant="primary", compact=True)

    def on_mount(self) -> None:
        self._tell()
        self._ask(0.0)
        if self._fields:
            self.query_one(f"#field-{self._fields[0].name}").focus()
        elif self._action.run is None or self._harms():
            self.query_one("#no").focus()
        else:
            self.query_one("#yes").focus()

    def on_resize(self) -> None:
        """Give the preview the remaining lines, so that the buttons are always visible."""
        most = int(self.size.height * 0.96)
        self.query_one("#told").styles.max_height = max(3, most - _FRAME - 2 * len(self._fields))
        self.query_one("#content").styles.max_height = max(1, most - _KEYS)

    def _harms(self) -> bool:
        return self._action.costs(self._scene, self._answers) is not None

    @on(Input.Changed)
    @on(Select.Changed)
    def changed(self, event: Input.Changed | Select.Changed) -> None:
        """Store the new value of a field, and update the command line and the preview."""
        event.stop()
        name = (event.control.id or "").removeprefix("field-")
        value = event.value if isinstance(event.value, str) else ""
        if self._answers.get(name, "") == value:
            return
        self._answers.pop(name, None)
        if value:
            self._answers[name] = value
        self._tell()
        self._ask(_REST)

    @on(Input.Submitted)
    def typed(self, event: Input.Submitted) -> None:
        """Move the focus on Enter: to the next field, or to the buttons after the last field."""
        event.stop()
        self.focus_next()

    def _words(self) -> tuple[Words, ...]:
        if self._action.run is None:
            look = self._action.look(self._scene, self._answers)
            return () if look is None else (look,)
        return self._action.run(self._scene, self._answers)

    def _tell(self) -> None:
        """Show the command line, the cost, and the first field that is still empty."""
        gap = actions.missing(self._action, self._scene, self._answers)
        words = self._words()
        more = f"  (and {len(words) - 1} more)" if len(words) > 1 else ""
        shown = gap or (f"$ {line(words[0])}{more}" if words else "")
        self.query_one("#line", Static).update(shown)
        cost = self._action.costs(self._scene, self._answers)
        self.query_one("#cost", Static).update(f"! {cost}")
        self.query_one("#cost").set_class(cost is None, "none")
        self._may(gap is None)

    def _may(self, can: bool) -> None:
        for button in self.query("#yes").results(Button):
            button.disabled = not can or self._waits

    def _ask(self, rest: float) -> None:
        look = self._action.look(self._scene, self._answers)
        gap = actions.missing(self._action, self._scene, self._answers)
        if look is None or gap is not None:
            self.workers.cancel_node(self)  # a running preview is outdated
            self.query_one("#told").add_class("none")
            return
        self._waits = self._harms()
        self._may(False)
        self.query_one("#told").remove_class("none")
        self.query_one("#text", Static).update(Text(f"running {line(look)} …", style="dim"))
        self.run_worker(self._look(look, rest), exclusive=True)

    async def _look(self, words: Words, rest: float) -> None:
        await asyncio.sleep(rest)
        width = max(60, self.query_one("#told").size.width - 4)
        try:
            said = await self._commands.ask(words, width)
            text = Text.from_ansi(said.text.rstrip() or "no output")
        except OSError as exc:
            text = Text(f"cannot run the command: {exc}")
        self.query_one("#text", Static).update(text)
        self._waits = False
        self._may(actions.missing(self._action, self._scene, self._answers) is None)

    @on(Button.Pressed, "#no")
    def action_no(self) -> None:
        """Close the dialog without running anything."""
        self._end(None)

    def _end(self, words: tuple[Words, ...] | None) -> None:
        # A second Enter may still arrive after the first has closed the dialog.
        if self.app.screen is self:
            self.dismiss(words)

    @on(Button.Pressed, "#yes")
    def action_yes(self) -> None:
        """Close the dialog with the commands, if all required fields are filled."""
        if self._action.run is None:
            return
        gap = actions.missing(self._action, self._scene, self._answers)
        if gap is not None or self._waits:
            self.notify(gap or "wait for the preview", severity="warning")
            return
        self._end(self._words())


def _asked(one: Field) -> "Select[str] | Input":
    if one.choices is None:
        return Input(value=one.value, placeholder=one.hint, id=f"field-{one.name}", compact=True)
    # The labels are Text, so that names of hosts and schedules are not parsed as markup.
    choices = [(Text(label), value) for label, value in one.choices]
    return Select(
        choices, value=one.value, allow_blank=False, id=f"field-{one.name}", compact=True
    )  # fmt: skip
