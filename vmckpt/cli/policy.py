"""vmckpt policy: list, show, check and explain policies."""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vmckpt.cli import output, plan
from vmckpt.cli.arguments import GUEST, INVENTORY, JSON, POLICIES, help_alone
from vmckpt.errors import HostUnreachable, PolicyError, run_doctor, silent_hosts
from vmckpt.model.guest import Guest
from vmckpt.model.host import Host
from vmckpt.policy.model import Policy
from vmckpt.units import show_count, show_seconds

if TYPE_CHECKING:
    from vmckpt.policy.select import Chosen

app = typer.Typer(
    invoke_without_command=True,
    rich_markup_mode=None,
)


@app.callback()
def policy_options(context: typer.Context) -> None:
    """Show, check and explain policies.

    A policy defines which guests it applies to, and how these guests are migrated, protected and
    snapshotted.
    """
    help_alone(context)


@app.command("list")
def list_(policies: POLICIES = None, inventory: INVENTORY = None, json: JSON = False) -> None:
    """List all policies, your own and those shipped with vmckpt.

    Example:

        vmckpt policy list
    """
    from vmckpt.policy import explain as explanations
    from vmckpt.policy import loader

    found = loader.survey(_folder(policies, inventory))
    if json:
        output.print_json([_line(policy) for policy in found.policies])
    else:
        shown = output.table(
            "name", "mode", ">downtime", ">time limit", "post-copy", "file", "description"
        )
        for policy in found.policies:
            shown.add_row(
                policy.name,
                str(policy.mode),
                show_seconds(policy.limits.max_downtime),
                explanations.limit(policy),
                "yes" if policy.may_switch_early else "no",
                "shipped" if policy.shipped else policy.file,
                policy.description,
            )
        output.out.print(shown)
    if found.problems:
        for problem in found.problems[1:]:
            output.complain(problem)
        raise PolicyError(found.problems[0])


def _line(policy: Policy) -> dict[str, Any]:
    limits = policy.limits
    return {
        "name": policy.name,
        "mode": str(policy.mode),
        "max_downtime": limits.max_downtime,
        "time": limits.time,
        "time_per_gib": limits.time_per_gib,
        "post_copy": policy.may_switch_early,
        "file": policy.file,
        "shipped": policy.shipped,
        "description": policy.description,
    }


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME|FILE", help="Name of a policy, or the path of a policy file."),
    ],
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show every value of a policy, where it is set, and its meaning.

    Examples:

        vmckpt policy show balanced

        vmckpt policy show ./mine.yaml --json
    """
    from vmckpt.policy import explain as explanations
    from vmckpt.policy import loader

    found = loader.load_one(name, _folder(policies, inventory))
    if json:
        output.print_json(explanations.as_json(found) | {"values": _values(found)})
    else:
        _show_values(found)


@app.command()
def check(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE|DIR", help="Policy files, or directories of policies."),
    ],
    json: JSON = False,
) -> None:
    """Check policy files and print all problems.

    The command prints one line per problem, and exits with code 4 if there is a problem.

    Example:

        vmckpt policy check policies/*.yaml
    """
    from vmckpt.policy import loader

    found = loader.problems(files)
    if json:
        output.print_json(
            [
                {"file": str(path), "good": not wrong, "problems": list(wrong)}
                for path, wrong in found.items()
            ]
        )
    else:
        for path, wrong in found.items():
            for line in wrong or (f"{path}: valid",):
                output.out.print(line, soft_wrap=True)
    bad = [path for path, wrong in found.items() if wrong]
    if bad:
        count = sum(map(len, found.values()))
        raise PolicyError(
            f"{show_count(count, 'problem')};"
            f" {len(found) - len(bad)} of {show_count(len(found), 'file')} valid"
        )


@app.command()
def explain(
    guest: GUEST,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", "-p", metavar="NAME|FILE", help="Explain as if this policy were requested."
        ),
    ] = None,
    policies: POLICIES = None,
    inventory: INVENTORY = None,
    json: JSON = False,
) -> None:
    """Show which policy applies to a guest, and why.

    The command also shows why other policies do not apply, and every value of the policy.

    Example:

        vmckpt policy explain web1
    """
    from vmckpt.policy import explain as explanations
    from vmckpt.policy import loader
    from vmckpt.policy.select import Subject, choose

    host, found = _find(guest, inventory)
    folder = _folder(policies, inventory)
    subject = Subject(
        guest=found.name,
        guest_labels=found.labels,
        host_labels=host.labels,
        memory=found.memory,
    )
    if policy is not None and loader.is_path(policy):
        # A named file is used even if other policies are invalid.
        own, others = loader.load_file(Path(policy)), loader.survey(folder).policies
        known, policy = (*(one for one in others if one.name != own.name), own), own.name
    else:
        known = loader.load_all(folder)
    chosen = choose(known, subject, policy)
    if json:
        output.print_json(_choice(host, found, chosen))
        return
    output.out.print(f"{found.name} on {host.name}:")
    for line in explanations.choice(chosen):
        output.out.print(f"  {line}")
    output.out.print()
    _show_values(chosen.policy)


@app.command()
def schema(json: JSON = False) -> None:
    """Print the JSON schema of policy files, for editors.

    Example:

        vmckpt policy schema > policies/schema.json
    """
    from vmckpt.policy import json_schema as json_schemas

    output.print_json(json_schemas.schema())


def _folder(policies: Path | None, inventory: Path | None) -> Path | None:
    from vmckpt import inventory as inventories
    from vmckpt.policy import loader

    return loader.folder(policies, inventories.find(inventory))


def _find(name: str, inventory: Path | None) -> tuple[Host, Guest]:
    """Find a guest and its host, preferably a host on which it is active.

    Raises BadInput if no host has the guest, HostUnreachable if a silent host may have it.
    """
    from vmckpt.app import controller, fleet

    known = controller.load_inventory(inventory)
    found, errors = asyncio.run(fleet.guests(known))
    called = [(host, guest) for host, guest in found if name in (guest.name, guest.uuid)]
    if called:
        return max(called, key=lambda one: one[1].state.is_active)
    if errors:
        raise HostUnreachable(
            f"guest {name} was not found on any host that answered; no answer from"
            f" {silent_hosts(errors)}",
            host=next(iter(errors)),
            hint=run_doctor(errors),
        )
    raise fleet.no_guest(known, name, found)


def _choice(host: Host, guest: Guest, chosen: "Chosen") -> dict[str, Any]:
    return {
        "guest": guest.name,
        "host": host.name,
        "policy": chosen.policy.name,
        "file": chosen.policy.file,
        "why": list(chosen.why),
        "passed_over": [
            {"policy": one.policy.name, "file": one.policy.file, "why": one.why}
            for one in chosen.passed_over
        ],
        "values": _values(chosen.policy),
    }


def _values(policy: Policy) -> list[dict[str, str]]:
    from vmckpt.policy import explain as explanations

    return [
        {"key": one.key, "value": one.value, "from": one.where, "meaning": one.meaning}
        for one in explanations.values(policy)
    ]


def _show_values(policy: Policy) -> None:
    """Print every value with its line; the file is printed once above the table."""
    from vmckpt.policy import explain as explanations

    output.out.print(f"{policy.name}: {policy.file}")
    shown = output.table("key", "value", ">line", "meaning")
    for one in explanations.values(policy):
        line = one.where.removeprefix(f"{policy.file}:")
        shown.add_row(one.key, one.value, line, output.styled("dim", one.meaning))
    output.out.print(shown)


app.command()(plan.replay)
