"""Find and read policy files: those that are shipped with vmckpt, and the operator's.

The operator's directory is `--policies DIR`, else VMCKPT_POLICIES, else `policies` next to
hosts.yaml, else /etc/vmckpt/policies. A policy in that directory replaces a shipped policy of the
same name.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from vmckpt.errors import PolicyError
from vmckpt.policy import parse, select
from vmckpt.policy.model import Policy
from vmckpt.util import config_file

SYSTEM = Path("/etc/vmckpt/policies")
_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Shelf:
    """All valid policies, and the problems of invalid files."""

    policies: tuple[Policy, ...]
    """Sorted by name; each name occurs once."""
    problems: tuple[str, ...]
    """The problems, one line each."""

    @property
    def wrong(self) -> str | None:
        """The first problem and the number of others, or None if there are no problems."""
        if not self.problems:
            return None
        more = len(self.problems) - 1
        return self.problems[0] + (f" (and {more} more)" if more else "")


def folder(
    explicit: Path | None,
    inventory: Path | None,
    environment: Mapping[str, str] = os.environ,
) -> Path | None:
    """Return the operator's directory, or None if there is none.

    Raises PolicyError if an explicitly named directory does not exist.
    """
    named = explicit or (
        Path(environment["VMCKPT_POLICIES"]) if environment.get("VMCKPT_POLICIES") else None
    )
    if named is not None:
        if not named.is_dir():
            raise PolicyError(
                f"{named}: no such directory", hint="check --policies and VMCKPT_POLICIES"
            )
        return named
    beside = [inventory.parent / "policies"] if inventory is not None else []
    return next((place for place in (*beside, SYSTEM) if place.is_dir()), None)


def survey(operators: Path | None) -> Shelf:
    """Read the shipped policies and the operator's policies, and collect all problems."""
    own, problems = ({}, ()) if _is_shipped(operators) else _read_folder(operators)
    shipped, broken = _read_shipped()
    policies = {**shipped, **own}
    return Shelf(tuple(policies[name] for name in sorted(policies)), (*problems, *broken))


def load_all(operators: Path | None) -> tuple[Policy, ...]:
    """Read all policies. Raises PolicyError with the first problem.

    An invalid file is not ignored, because it may contain the policy for the guest.
    """
    shelf = survey(operators)
    if shelf.wrong is not None:
        raise PolicyError(shelf.wrong)
    return shelf.policies


def is_path(wanted: str) -> bool:
    """Return whether the operator's argument is a file path rather than a policy name."""
    return "/" in wanted or wanted.endswith(_ENDINGS)


def load_one(wanted: str, operators: Path | None) -> Policy:
    """Read a policy by name, or from a file if `wanted` looks like a path.

    Raises PolicyError.
    """
    if is_path(wanted):
        return load_file(Path(wanted))
    return select.by_name(load_all(operators), wanted)


def load_file(path: Path) -> Policy:
    """Read the policy from a file. Raises PolicyError with the first problem."""
    return parse.parse(config_file.read(path, PolicyError, "policy"), path)


def text_of(policy: Policy) -> str | None:
    """Return the text of a policy's file, or None if the file cannot be read."""
    try:
        return Path(policy.file).read_text(encoding="utf-8")
    except OSError:
        return None


def problems(files: Sequence[Path]) -> Mapping[Path, tuple[str, ...]]:
    """Find all problems in files, and in the files of directories.

    Returns the problems by file, one line each; empty for a valid file.
    """
    found: dict[Path, tuple[str, ...]] = {}
    names: dict[str, Path] = {}
    for path in [one for place in files for one in (_files(place) if place.is_dir() else [place])]:
        policy, wrong = _examine(path)
        if policy is not None and names.setdefault(policy.name, path) != path:
            wrong = (_twice(policy, names[policy.name]),)
        found[path] = wrong
    return found


def _examine(path: Path) -> tuple[Policy | None, tuple[str, ...]]:
    try:
        text = config_file.read(path, PolicyError, "policy")
    except PolicyError as exc:
        return None, (str(exc),)
    policy, wrong = parse.examine(text, path)
    return policy, tuple(one.at(path) for one in wrong)


def _read_folder(place: Path | None) -> tuple[dict[str, Policy], tuple[str, ...]]:
    found: dict[str, Policy] = {}
    wrong: list[str] = []
    for path in _files(place) if place is not None else []:
        policy, problems_here = _examine(path)
        wrong += problems_here
        if policy is None:
            continue
        if policy.name in found:
            wrong.append(_twice(policy, Path(found[policy.name].file)))
        found.setdefault(policy.name, policy)
    return found, tuple(wrong)


def _read_shipped() -> tuple[dict[str, Policy], tuple[str, ...]]:
    found: dict[str, Policy] = {}
    wrong: list[str] = []
    for entry in resources.files("vmckpt_policies").iterdir():
        if entry.name.endswith(_ENDINGS):
            path = Path(str(entry))
            text = entry.read_text(encoding="utf-8")
            policy, problems_here = parse.examine(text, path, shipped=True)
            wrong += [one.at(path) for one in problems_here]
            if policy is not None:
                found[policy.name] = policy
    return found, tuple(wrong)


def _is_shipped(place: Path | None) -> bool:
    """Return whether a directory is the shipped one; in a checkout it is next to hosts.yaml."""
    return place is not None and place.resolve() == Path(str(resources.files("vmckpt_policies")))


def _files(place: Path) -> list[Path]:
    return sorted(path for path in place.iterdir() if path.suffix in _ENDINGS)


def _twice(policy: Policy, first: Path) -> str:
    line = dict(policy.given).get("name", 1)
    return f"{policy.file}:{line}: name {policy.name} is already used by {first}"
