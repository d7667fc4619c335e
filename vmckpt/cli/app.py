"""The command line of `vmckpt`: its commands, and the mapping of errors to exit codes."""

import functools
import importlib
import logging
import os
import signal
import sys
from typing import Annotated, Any, cast

import typer

import vmckpt
from vmckpt.cli import output
from vmckpt.cli.arguments import help_alone
from vmckpt.cli.commands import Place, place_of, places
from vmckpt.errors import BadInput, VmckptError
from vmckpt.journal import controller_identity, location

# Typer bundles click and does not export ClickException, the base class of BadParameter.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])


class _Commands(typer.core.TyperGroup):
    """The group of all commands. A command and its libraries are loaded when it is first used."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return list(places())

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        place = place_of(cmd_name)
        return None if place is None else loaded(cmd_name, place)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        room = formatter.width - 6 - max(map(len, places()))
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, _shortened(place.says, room)) for name, place in places().items()]
            )


def loaded(name: str, place: Place) -> Any:
    """Import a command and return its click command object."""
    found = getattr(importlib.import_module(f"{place.package}.{place.module}"), place.name)
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        alone.command(name)(found)
        found = alone
    # An app with one command becomes a plain command: a group would add completion options.
    group = found.registered_callback or len(found.registered_commands) > 1
    made = typer.main.get_group(found) if group else typer.main.get_command(found)
    made.name = name
    _declare(f"vmckpt {name}", made)
    return made


def _declare(path: str, command: Any) -> None:
    """Make a command and its subcommands declare, when they run, what this process runs."""
    for name, one in getattr(command, "commands", {}).items():
        _declare(f"{path} {name}", one)
    if (callback := command.callback) is None:
        return

    @functools.wraps(callback)
    def declared(*args: Any, **options: Any) -> Any:
        controller_identity.runs(path)
        return callback(*args, **options)

    command.callback = declared


def _shortened(text: str, room: int) -> str:
    """Shorten a text to `room` characters at a word boundary, as click does."""
    if len(text) <= room:
        return text
    return text[: room - 2].rpartition(" ")[0] + "..."


app = typer.Typer(
    name="vmckpt",
    cls=_Commands,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        output.out.print(f"vmckpt {vmckpt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log messages of libvirt and ssh to stderr.")
    ] = False,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL|none",
            envvar=location.VARIABLE,
            help="Journal of jobs. Machines can share postgresql://USER@HOST/DB; put the password"
            " in ~/.pgpass.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Forbid all changes, like VMCKPT_READ_ONLY=1.")
    ] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Migrate, replicate and snapshot QEMU/KVM guests under libvirt."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.CRITICAL,
        handlers=[output.log_handler()],
    )
    if read_only:
        from vmckpt.inventory import READ_ONLY

        os.environ[READ_ONLY] = "1"
    if journal is not None:
        source = context.get_parameter_source("journal")
        _choose_journal(journal, typed=source is not None and source.name == "COMMANDLINE")
    help_alone(context)


def _choose_journal(journal: str, *, typed: bool) -> None:
    """Use a journal. `typed`: the journal was given on the command line.

    Raises BadInput if a typed URL contains a password, and the errors of `location.choose`.
    """
    if typed and location.has_password(journal):
        raise BadInput(
            "--journal contains a password, which every user of this machine can read with ps",
            hint="change the password, then put the new password in ~/.pgpass or PGPASSFILE, or put"
            f" the URL in {location.VARIABLE}",
        )
    location.choose(journal)


def run(args: list[str]) -> int:
    """Run one command. Returns its exit code; errors are printed, not raised."""
    # SIGTERM acts like Ctrl-C, so that commands without their own handler also clean up.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        result = app(args, standalone_mode=False, prog_name="vmckpt")
    except VmckptError as exc:
        output.complain(str(exc))
        return exc.exit_code
    except _ClickException as exc:
        output.complain(_in_one_line(exc))
        return 2
    except (KeyboardInterrupt, typer.Abort):
        output.say("stopped")
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except OSError as exc:  # no permission, disk full: the system's message is the clearest
        output.complain(f"{exc.filename or 'this machine'}: {exc.strerror or exc}")
        return 1
    return result if isinstance(result, int) else 0


def _in_one_line(error: Exception) -> str:
    """Return a command line error as one line, with the --help command as a hint."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "vmckpt"
    text: str = getattr(error, "format_message", error.__str__)()
    text = text.replace("Value error, ", "")  # pydantic's word before the parser's message
    return f"{' '.join(text.split()).rstrip('.')}; see {command} --help"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
