"""The program `vmckpt`: its commands, and the one place where errors become exit codes."""

import importlib
import logging
import os
import signal
import sys
from typing import Annotated, Any, cast

import typer

import vmckpt
from vmckpt.cli import hosts, jobs, lab, output, plan, policy
from vmckpt.cli.arguments import help_alone
from vmckpt.cli.migrate import migrate, resume
from vmckpt.cli.recover import recover
from vmckpt.errors import VmckptError
from vmckpt.inventory import READ_ONLY
from vmckpt.journal import place

# Typer has a click of its own and exports only the end of its error tree.
_ClickException = cast("type[Exception]", typer.BadParameter.__mro__[2])


_ALONE = ("dashboard", "events", "guard", "manual", "prepare", "run", "schema")
"""Commands with a module of their own, of the same name."""
_PROTECTION = ("protect", "unprotect", "failover", "status")


_HOSTS = ("evacuate", "repopulate", "balance", "roll", "maintenance")


def _of_hosts(name: str) -> Any:
    """Commands on whole hosts."""
    if name == "maintenance":
        from vmckpt.cli import maintenance  # noqa: PLC0415

        return typer.main.get_group(maintenance.app)
    if name == "roll":
        from vmckpt.cli import roll  # noqa: PLC0415

        return typer.main.get_command(roll.app)
    from vmckpt.cli import evacuate  # noqa: PLC0415

    return typer.main.get_command(evacuate.COMMANDS[name])


class _Commands(typer.core.TyperGroup):
    """All commands; those for snapshots, and the libraries they need, are loaded when asked for."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        later = [*_ALONE, "snapshot", *_PROTECTION, *_HOSTS]
        return [*super().list_commands(ctx), *later]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        if cmd_name in _ALONE:
            found = importlib.import_module(f"vmckpt.cli.{cmd_name}")
            return typer.main.get_command(found.app)
        if cmd_name in _HOSTS:
            return _of_hosts(cmd_name)
        if cmd_name in _PROTECTION:
            from vmckpt.cli import protect  # noqa: PLC0415

            return typer.main.get_command(protect.COMMANDS[cmd_name])
        if cmd_name != "snapshot":
            return super().get_command(ctx, cmd_name)
        from vmckpt.cli import snapshot  # noqa: PLC0415

        return typer.main.get_group(snapshot.app)


app = typer.Typer(
    name="vmckpt",
    cls=_Commands,
    invoke_without_command=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(hosts.hosts)
app.command()(hosts.guests)
app.command()(hosts.label)
app.command()(hosts.doctor)
app.command()(migrate)
app.command()(plan.plan)
policy.app.command()(plan.replay)
app.command()(resume)
app.command()(recover)
jobs.add_to(app)
app.add_typer(lab.app, name="lab")
app.add_typer(policy.app, name="policy")


def _version(asked: bool) -> None:
    if asked:
        output.out.print(f"vmckpt {vmckpt.__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Log what libvirt and ssh say to stderr.")
    ] = False,
    journal: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|URL|none",
            envvar=place.VARIABLE,
            help="Where jobs are recorded: postgresql://USER@HOST/DB serves several machines.",
        ),
    ] = None,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Look and do not touch; also by VMCKPT_READ_ONLY=1.")
    ] = False,
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Live-migrate QEMU/KVM guests under libvirt."""
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.CRITICAL,
        handlers=[output.log_handler()],
    )
    if read_only:
        os.environ[READ_ONLY] = "1"
    if journal is not None:
        place.choose(journal)
    help_alone(context)


def run(args: list[str]) -> int:
    """Run one command; the exit code."""
    # Commands without a handler of their own end on SIGTERM as on Ctrl-C: cleaned up.
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
    except OSError as exc:  # no permission, no room: the machine's own words are the best
        output.complain(f"{exc.filename or 'this machine'}: {exc.strerror or exc}")
        return 1
    return result if isinstance(result, int) else 0


def _in_one_line(error: Exception) -> str:
    """A complaint about the command line, and where to read on."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "vmckpt"
    text: str = getattr(error, "format_message", error.__str__)()
    return f"{' '.join(text.split()).rstrip('.')}; see {command} --help"


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
