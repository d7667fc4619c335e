"""The Ansible collection, used by playbooks on real hosts."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.bench import Bench
from tests.lab.snapshots import SMALL
from tests.support.paths import ROOT

pytestmark = pytest.mark.long
PROGRAMS = Path(sys.executable).parent
TASK = """\
- hosts: localhost
  gather_facts: false
  tasks:
    - vmckpt.vmckpt.{module}: {options}
"""


@pytest.fixture
def collections(tmp_path: Path) -> Path:
    """A directory with the collection where Ansible expects it."""
    at = tmp_path / "ansible_collections/vmckpt/vmckpt"
    shutil.copytree(ROOT / "ansible", at)
    return tmp_path


def environment(bench: Bench, collections: Path) -> dict[str, str]:
    return bench.environment | {
        "PATH": f"{PROGRAMS}:{bench.environment['PATH']}",
        "ANSIBLE_COLLECTIONS_PATH": str(collections),
        "ANSIBLE_CALLBACKS_ENABLED": "ansible.builtin.tree",
        "ANSIBLE_CALLBACK_TREE_DIR": str(collections / "results"),
        "ANSIBLE_HOME": str(collections / "home"),
        "ANSIBLE_LOCALHOST_WARNING": "false",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }


def play(bench: Bench, collections: Path, module: str, *words: str, **options: Any) -> Any:
    """Run one task on this machine. Returns its result, whether it failed or not."""
    book = collections / "play.yml"
    book.write_text(TASK.format(module=module, options=json.dumps(options)))
    done = subprocess.run(
        [PROGRAMS / "ansible-playbook", "-i", "localhost,", "-c", "local", *words, book],
        env=environment(bench, collections), capture_output=True, text=True, check=False,
    )  # fmt: skip
    result = collections / "results/localhost"
    assert result.exists(), done.stdout + done.stderr
    told = json.loads(result.read_text())
    result.unlink()
    return told


def changes(bench: Bench, collections: Path, module: str, **options: Any) -> Any:
    """Run a task in check mode, then really, then again. Returns the result of the second run.

    The first two runs report a change, the third one none.
    """
    found = []
    for words, changed in ((("--check",), True), ((), True), ((), False)):
        told = play(bench, collections, module, *words, **options)
        assert told.get("changed") is changed, told
        assert not told.get("failed"), told
        found.append(told)
    return found[1]


def test_modules_change_what_they_should_and_only_once(kept: Bench, collections: Path) -> None:
    kept.guest(**SMALL)
    state = play(kept, collections, "info")
    assert not state["changed"]
    assert [one["name"] for one in state["hosts"]] == ["alpha", "beta"]
    assert [(one["name"], one["host"]) for one in state["guests"]] == [("web1", "alpha")]

    told = changes(kept, collections, "migrate", guest="web1", to="beta", mode="precopy")
    assert told["report"]["target"] == "beta"
    assert kept.where() == ["beta"]

    told = changes(kept, collections, "snapshot", guest="web1", name="before", memory=False)
    listed = play(kept, collections, "info", snapshots=True)["snapshots"]
    assert [(one["guest"], one["name"]) for one in listed] == [("web1", "before")]
    told = play(kept, collections, "snapshot", guest="web1", name="other", state="restored")
    assert told["msg"] == "web1 has no snapshot other"
    changes(kept, collections, "snapshot", guest="web1", name="before", state="absent")

    changes(kept, collections, "evacuate", host="beta", why="update")
    assert kept.where() == ["alpha"]
    changes(kept, collections, "evacuate", host="beta", state="repopulated")
    assert kept.where() == ["beta"]

    changes(kept, collections, "protect", guest="web1", to="alpha", failover="manual")
    told = play(kept, collections, "protect", guest="web1", to="gamma")
    assert told["msg"] == "web1 has a standby on alpha; end that protection first (state: absent)"
    changes(kept, collections, "protect", guest="web1", state="absent")

    told = play(kept, collections, "migrate", guest="web9", to="beta")
    assert told["msg"] == "web9: no such guest"
    told = play(kept, collections, "migrate", guest="web1", to="nowhere")
    assert "nowhere" in told["msg"]
    assert told["rc"] in (2, 3)


def test_the_inventory_has_the_hosts_with_their_labels(kept: Bench, collections: Path) -> None:
    inventory = collections / "vmckpt.yml"
    inventory.write_text(
        f"plugin: vmckpt.vmckpt.hosts\nhosts_yaml: {kept.plan.inventory}\n"
        "keyed_groups: [{key: \"vmckpt_uri.split(':')[0]\", prefix: uri}]\n"
    )
    done = subprocess.run(
        [PROGRAMS / "ansible-inventory", "-i", inventory, "--list"],
        env=environment(kept, collections), capture_output=True, text=True, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert sorted(told["vmckpt"]["hosts"]) == ["alpha", "beta"]
    about = told["_meta"]["hostvars"]["alpha"]
    alpha = kept.inventory.host("alpha")
    assert alpha.ssh is not None
    assert about["ansible_host"]["__ansible_unsafe"] == alpha.ssh.address
    assert sorted(told["uri_qemu_tcp"]["hosts"]) == ["alpha", "beta"]

    inventory.write_text("plugin: vmckpt.vmckpt.hosts\nhosts_yaml: none.yaml\n")
    failed = subprocess.run(
        [PROGRAMS / "ansible-inventory", "-i", inventory, "--list"],
        env=environment(kept, collections), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "none.yaml: not a vmckpt inventory" in failed.stderr
