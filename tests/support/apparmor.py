"""Find out whether an AppArmor profile lets a program open a file, from the profile's text.

Only rules for files are read. The syntax is that of apparmor.d(5).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLES = {
    "PROC": "/proc", "HOME": "/root", "HOMEDIRS": "/home", "multiarch": "*-linux-gnu*",
    "pid": "[1-9]*", "pids": "[1-9]*", "tid": "[1-9]*", "run": "{/run,/var/run}", "sys": "/sys",
    "etc_ro": "{/usr/etc,/etc}", "etc_rw": "/etc",
}  # fmt: skip
"""What the variables of Debian's tunables mean here."""
_RULE = re.compile(
    r'^(?P<words>(?:(?:audit|owner|deny|allow) )*)"?(?P<path>[/{@][^"]*?)"?\s+(?P<may>[a-zA-Z]+)$'
)


@dataclass(frozen=True)
class Rule:
    """A rule for files."""

    path: re.Pattern[str]
    may: frozenset[str]
    denies: bool
    text: str


def lines(name: Path, folders: Sequence[Path]) -> Iterator[str]:
    """The lines of a profile, with those of the files that it includes."""
    for line in name.read_text().splitlines():
        found = re.match(r"\s*#?include\s+(if exists\s+)?<([^>]+)>", line)
        if not found:
            yield line
            continue
        included = next((one / found[2] for one in folders if (one / found[2]).exists()), None)
        if included is None:
            assert found[1] or found[2].startswith("local/"), f"{name}: {found[2]} is missing"
        elif included.is_dir():
            for each in sorted(included.iterdir()):
                yield from lines(each, folders)
        else:
            yield from lines(included, folders)


def rules(
    text: Iterator[str] | Sequence[str], variables: Mapping[str, str] = VARIABLES
) -> list[Rule]:
    """The rules for files among the lines of a profile."""
    found = []
    for line in text:
        plain = re.sub(r"(^|\s)#.*", "", line).strip().rstrip(",").strip()
        match = _RULE.match(plain)
        if match:
            path = match["path"]
            for name, value in variables.items():
                path = path.replace("@{" + name + "}", value)
            assert "@{" not in path, line
            path = re.sub("(?<!:)//+", "/", path)
            found.append(Rule(
                path=re.compile(expression(path)), may=frozenset(match["may"]),
                denies="deny" in match["words"].split(), text=plain,
            ))  # fmt: skip
    return found


def expression(glob: str) -> str:
    """The regular expression that matches what AppArmor's pattern matches."""
    made, depth, at = "", 0, 0
    while at < len(glob):
        one = glob[at]
        if glob.startswith("**", at):
            made += ".*"
            at += 1
        elif one == "*":
            made += "[^/]*"
        elif one == "?":
            made += "[^/]"
        elif one == "[":
            end = glob.index("]", at)
            made += glob[at : end + 1]
            at = end
        elif one == "{":
            depth += 1
            made += "(?:"
        elif one == "}" and depth:
            depth -= 1
            made += ")"
        elif one == "," and depth:
            made += "|"
        elif one == "\\":
            at += 1
            made += re.escape(glob[at])
        else:
            made += re.escape(one)
        at += 1
    return f"{made}$"


def permits(known: Sequence[Rule], path: str, needs: str) -> bool:
    """Whether the rules let a program open a path. `needs`: "r", "w" or both."""
    matching = [one for one in known if one.path.match(path)]
    if any(one.denies and one.may & set(needs) for one in matching):
        return False
    may = {each for one in matching if not one.denies for each in one.may}
    return set(needs) <= may
