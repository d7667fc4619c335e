"""The table of docs/migration.md, made from the table of host resources.

`python -m tests.support.host_resources_table` writes it into the document.
"""

from tests.support.paths import ROOT
from vmckpt.definition.host_resources import CHARACTER_DEVICES, CHECKS, ROWS, Kind
from vmckpt.model.finding import Severity

DOCUMENT = ROOT / "docs/migration.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def elements(kind: Kind) -> list[str]:
    """The elements of one kind, without those of backing files, which are like their disk's."""
    found: dict[str, None] = {}
    for row in ROWS:
        if row.kind is kind and "backingStore" not in row.path:
            path = row.in_schema.removeprefix("devices/")
            first, _, rest = path.partition("/")
            if first in CHARACTER_DEVICES and rest.startswith(("log/", "source/")):
                path = f"serial/{rest}"
            found[path] = None
    return list(found)


def table() -> str:
    lines = [
        "| needs | in the definition | how it is checked | finding |",
        "|---|---|---|---|",
    ]
    for kind, check in CHECKS.items():
        severity = {row.severity for row in ROWS if row.kind is kind}
        warns = " (warning)" if severity == {Severity.WARNING} else ""
        named = ", ".join(f"`{one}`" for one in elements(kind))
        lines.append(f"| {kind} | {named} | {check.how} | `{check.code}`{warns} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into the document."""
    text = DOCUMENT.read_text()
    before, rest = text.split(BEGIN)
    DOCUMENT.write_text(before + BEGIN + table() + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
