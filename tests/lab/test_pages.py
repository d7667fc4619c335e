"""The commands of docs/snapshots.md and of the pages on moves, in their order, as they are typed.

They are read from the pages. Names, files and ports that operators choose themselves are replaced.
docs/start.md has its own test; tests/unit/project/test_docs.py checks that no command is left out.
"""

import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import yaml

from tests.lab.bench import VMCKPT, Bench, Done, ended_late, finish, gathered
from tests.lab.snapshots import SMALL
from tests.support.doc_commands import NOT_TYPED, blocks, commands
from tests.support.doc_examples import differences
from tests.support.paths import ROOT
from tests.support.served_dashboards import free_port
from tests.support.tmux import terminal

GUESTS = ("web1", "web2", "db1")


@dataclass(frozen=True)
class Operator:
    """Types commands in a directory of its own, at a lab whose inventory has a second store."""

    bench: Bench
    home: Path
    ended: dict[str, Done] = field(default_factory=dict)
    """How each command ended, as the page has it."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            **self.bench.environment, "VMCKPT_INVENTORY": str(self.home / "hosts.yaml"),
            "VMCKPT_STATE": str(self.home / "state"), "HOME": str(self.home),
            "VMCKPT_LAB": self.bench.plan.name,
            "VMCKPT_IDENTITY": str(self.home / "vmckpt.key"), "XDG_RUNTIME_DIR": str(self.home),
        }  # fmt: skip

    def start(self, line: str, *, merged: bool = False) -> "subprocess.Popen[str]":
        words = [one.replace("~", str(self.home)) for one in shlex.split(line)]
        return subprocess.Popen(
            [*VMCKPT, *words[1:]], env=self.environment, cwd=self.home, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if merged else subprocess.PIPE,
        )  # fmt: skip

    def good(self, line: str) -> Done:
        done = finish(self.start(line))
        assert done.code == 0, f"{line}: {done.err}"
        return done

    def stopped(self, line: str, word: str) -> Done:
        """Start a command that runs until Ctrl-C, which is typed once it has printed a word."""
        process = self.start(line, merged=True)
        assert process.stdout is not None
        lines: list[str] = []
        with ended_late(process, 120.0):
            while not lines or word not in lines[-1]:
                lines.append(process.stdout.readline())
                assert lines[-1], f"{line}: {''.join(lines)}"
        process.send_signal(signal.SIGINT)
        out, _ = gathered(process)
        assert process.returncode in (0, 130), f"{line}: {''.join(lines)}{out}"
        return Done(process.returncode, "".join(lines) + out, "")


@pytest.fixture
def operator(kept: Bench, tmp_path: Path) -> Iterator[Operator]:
    kept.inside("alpha", "rm", "-rf", str(kept.plan.shared / "snapshots"))
    told = yaml.safe_load(kept.plan.inventory.read_text())
    told["stores"] = {**told["stores"], "far": str(kept.plan.shared / "far")}
    (kept.plan.shared / "far").mkdir()
    (tmp_path / "hosts.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    yield Operator(kept, tmp_path)
    kept.inside("alpha", "rm", "-rf", str(kept.plan.shared / "far"))


def yaml_block(page: str, first: str) -> str:
    """A block of a page that begins with this line."""
    found = [one for one in blocks(ROOT / "docs" / page) if one.tag == "yaml"]
    return next("\n".join(one.lines) for one in found if one.lines[0].startswith(first))


UNTIL_CTRL_C = {
    "vmckpt run": "web1",
    "vmckpt run --metrics 0.0.0.0:9469": "metrics",
    "vmckpt lab observe web1": "longest silence",
    "vmckpt snapshot open NAME": "press Ctrl-C",
    "vmckpt snapshot open NAME --listen 10809": "press Ctrl-C",
}
"""Commands that run until they are stopped, each with a word that shows that it runs."""
SHOWS = {
    "vmckpt dashboard --simulate": "24 hosts",
    "vmckpt dashboard --simulate 1000x20000": "1,000 hosts",
}
"""What a dashboard shows, if not web1."""


def tried(operator: Operator, page: str, own: Mapping[str, Callable[[], str]]) -> None:
    """Type all commands of a page, with these parts replaced."""
    typed = [line for _, line in commands(ROOT / "docs" / page)]
    assert typed
    for line in typed:
        if line in NOT_TYPED:
            continue
        words = line
        for part, replaced in own.items():
            words = words.replace(part, replaced()) if part in words else words
        word = UNTIL_CTRL_C.get(line)
        operator.ended[line] = (
            operator.good(words) if word is None else operator.stopped(words, word)
        )
    printed = {line: done.out for line, done in operator.ended.items()}
    assert (found := differences(ROOT / "docs" / page, printed)) == [], "\n".join(found)


@pytest.mark.long
def test_the_page_on_snapshots(operator: Operator) -> None:
    for name in GUESTS:
        operator.bench.guest(name, **{**SMALL, "disk_format": "qcow2"})
    requeue = operator.home / "requeue"
    requeue.write_text("#!/bin/sh\necho requeued\n")
    requeue.chmod(0o755)
    (operator.home / "policies").mkdir()
    nightly = yaml_block("snapshots.md", "# policies/nightly.yaml")
    (operator.home / "policies/nightly.yaml").write_text(nightly)
    operator.good("vmckpt snapshot init --store far")

    def public() -> str:
        line = "vmckpt snapshot keys new ~/vmckpt.key"
        return operator.ended[line].out.strip()

    def group() -> str:
        told = operator.ended["vmckpt snapshot create --group web1,web2,db1"].out
        return next(word for word in told.split() if word.startswith("g-")).rstrip(":")

    def disks_only() -> str:
        told = operator.ended["vmckpt snapshot create web1 --no-memory"].out
        return next(word for word in told.split() if word.startswith("s-")).rstrip(":")

    own = {
        "~/vmckpt.key": lambda: "~/vmckpt.key --no-passphrase",
        "vmckpt-admin-pub:…": public,
        "g-uq6nkk3ydjr4zqhe": group,
        "'curl -sf http://web1/' --check-for 2m": lambda: "true --check-for 1s",
        "ssh web1 apt-get -y upgrade": lambda: "true",
        "A B": lambda: f"before-upgrade {disks_only()}",
        "delete NAME": lambda: f"delete {disks_only()} --yes",
        "NAME FILE": lambda: "before-upgrade before.archive",
        "import FILE": lambda: "import before.archive",
        "NAME": lambda: "before-upgrade",
        "10809": lambda: str(free_port()),
    }
    tried(operator, "snapshots.md", own)
    assert "requeued" in str(operator.ended)
    assert operator.bench.where("web1-test") != []


@pytest.mark.long
@pytest.mark.parametrize(
    "page", ["migration.md", "policies.md", "evacuation.md", "monitoring.md", "lab.md"]
)
def test_a_page_on_moves(operator: Operator, page: str) -> None:
    operator.bench.guest("web1", **SMALL)
    (operator.home / "policies").mkdir()
    shop = yaml_block("policies.md", "version: vmckpt/v1").replace("shop-*", "web1")
    (operator.home / "policies/shop.yaml").write_text(shop)
    (operator.home / "fleet.yaml").write_text(yaml_block("evacuation.md", "hosts:"))
    operator.good("vmckpt migrate web1 --to beta --trace trace.jsonl")
    operator.good("vmckpt migrate web1 --to alpha")
    own = {
        "lab guest web1": lambda: "lab guest web2",
        "shop-1": lambda: "web1", "TRACE": lambda: "trace.jsonl",
        '--why "new memory"': lambda: '--why "new memory" --yes',
        "repopulate alpha": lambda: "repopulate alpha --yes",
        "0.0.0.0:9469": lambda: f"127.0.0.1:{free_port()}",
    }  # fmt: skip
    tried(operator, page, own)


@pytest.mark.long
def test_the_page_on_the_dashboard(operator: Operator) -> None:
    operator.bench.guest("web1", **SMALL)
    operator.good("vmckpt migrate web1 --to beta --trace slow-night.jsonl")
    for number, (_, line) in enumerate(commands(ROOT / "docs/dashboard.md")):
        if line in NOT_TYPED:
            continue
        trace = str(operator.home / "slow-night.jsonl")
        words = [*VMCKPT, *shlex.split(line.replace("slow-night.jsonl", trace))[1:]]
        files = operator.home / str(number)
        files.mkdir()
        with terminal(files, words, operator.environment, (100, 30)) as screen:
            screen.until(SHOWS.get(line, "web1"))
