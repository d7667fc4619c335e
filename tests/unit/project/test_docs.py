"""What README and docs tell people to type is what the program takes."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.support.doc_commands import NOT_TYPED, TYPED, blocks, commands, essence, executed
from tests.support.doc_examples import ELSEWHERE, TAGS, examples
from tests.support.paths import ROOT
from vmckpt.cli import app

PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("vagrant/*.md")])
_PROGRAMS = (
    "./", ".venv/", "vmckpt", "vagrant", "sudo", "python3", "apt-get", "ln", "cd", "export", "for",
    "(umask", "echo", "ansible-galaxy", "nbdcopy", "qemu-img", "journalctl",
)  # fmt: skip
_TYPED_LINE = re.compile(r" |$|#|" + "|".join(map(re.escape, _PROGRAMS)))
"""Commands, their further lines, and comments."""
_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


def lines() -> Iterator[Any]:
    for page in PAGES:
        for number, words in commands(page):
            if "…" not in words:
                yield pytest.param(words, id=f"{page.name}:{number}")


def taken(words: list[str]) -> None:
    """Raises what the program would say of it; nothing is run."""
    command: Any = typer.main.get_command(app.app)
    context = command.make_context("vmckpt", list(words))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("line", list(lines()))
def test_the_program_takes_what_the_docs_tell(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = shlex.split(line, comments=True)
    words = words[: next((n for n, one in enumerate(words) if one in ("|", ">", "&&")), len(words))]
    taken(words[1:])


def test_every_command_of_the_docs_is_run_by_a_test() -> None:
    # Those of vagrant/README.md are for its virtual machine.
    pages = [page for page in PAGES if page.parent.name != "vagrant"]
    found = [(page.name, line) for page in pages for _, line in commands(page)]
    typed = {line for page, line in found if page in TYPED} - set(NOT_TYPED)
    run = [*executed(), *map(essence, typed)]
    assert [line for _, line in found if not any(essence(line) <= words for words in run)] == []
    assert set(NOT_TYPED) <= {line for _, line in found}
    tests = [reason.rpartition(": ")[2] for reason in NOT_TYPED.values()]
    assert [test for test in tests if not (ROOT / test).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_output_is_in_blocks_whose_commands_are_known(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}:{block.number}"
        if block.tag:
            assert block.tag in TAGS, where
            assert block.tag != "console" or block.lines[0].startswith("$ vmckpt "), where
            continue
        joined = "\n".join(block.lines).replace("\\\n", " ")
        other = [line for line in joined.split("\n") if not _TYPED_LINE.match(line)]
        assert other == [], f"{where}: tag the block, see tests/support/doc_examples.py"


def test_the_output_of_each_example_is_compared_by_a_test() -> None:
    found = [one for page in PAGES for one in examples(page)]
    assert len(found) > 10
    assert [one for one in found if not one.output] == []
    elsewhere = {(one.page, one.command) for one in found if one.page not in TYPED}
    assert elsewhere == set(ELSEWHERE)
    assert [one for one in found if one.page in TYPED and one.command in NOT_TYPED] == []
    for (page, command), test in ELSEWHERE.items():
        assert f'shown("{page}", "{command}"' in (ROOT / test).read_text()


def test_what_the_program_does_not_know_is_found() -> None:
    with pytest.raises(Exception, match="No such option"):
        taken(["migrate", "web1", "--to", "beta", "--bandwith", "1gbit"])
    with pytest.raises(Exception, match="No such command"):
        taken(["snapshot", "tkae"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        if "://" in target:
            continue
        there = (page.parent / target).resolve()
        assert there.exists(), f"{page.name}: {target}"
        if anchor and there.suffix == ".md":
            heads = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
            known = {re.sub(r"[^\w\- ]", "", one.lower()).replace(" ", "-") for one in heads}
            assert anchor[1:] in known, f"{page.name}: {target}{anchor}"


_SECURITY = ROOT / "docs/security.md"
_TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+))?")
ATTACKERS = (
    "Local users of a host", "The migration network", "A dishonest host", "A dishonest store",
    "A web browser",
)  # fmt: skip


def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", _SECURITY.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_test_that_the_page_on_security_names_is_there() -> None:
    named = _TEST.findall(_SECURITY.read_text())
    missing = [
        (file, test)
        for file, test in named
        if not (ROOT / file).is_file()
        or (test and not re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(), re.M))
    ]
    assert (missing, len(named) > 50) == ([], True)


@pytest.mark.parametrize("attacker", ATTACKERS)
def test_each_claim_about_an_attacker_names_the_test_that_shows_it(attacker: str) -> None:
    rows = [
        line for line in sections()[attacker].splitlines()
        if line.startswith("| ") and not line.startswith(("| |", "| what", "|--"))
    ]  # fmt: skip
    assert rows
    assert [line for line in rows if not _TEST.search(line.rpartition("|")[0])] == []


def test_the_page_on_security_says_what_is_not_protected() -> None:
    assert sections()["What is not protected"].count("\n* ") > 5
