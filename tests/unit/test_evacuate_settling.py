"""An evacuation that is gone on with keeps to the policy that it was ordered by."""

from pathlib import Path
from typing import Any

from tests.tui.still import operation
from vmckpt.evacuate import settling
from vmckpt.policy import shelf

OWN = "version: vmckpt/v1\nname: {name}\nevacuate: {{tries: 9}}\n"


def in_force(**told: Any) -> dict[str, int]:
    """Names of policies, and how often each tries."""
    one = operation("e-1", "evacuate", policy="nightly", **told)
    found = settling.in_force(one, shelf.load_all(None))
    return {policy.name: policy.evacuation.tries for policy in found}


def test_the_policy_of_a_file_is_known_though_nobody_names_the_file_again(tmp_path: Path) -> None:
    shipped = in_force()
    path = tmp_path / "nightly.yaml"
    path.write_text(OWN.format(name="nightly"))
    text = shelf.text_of(shelf.load_file(path))
    assert in_force(detail={"policy": text}) == shipped | {"nightly": 9}
    # One of the same name that was changed or is another one does not count.
    text = OWN.format(name="maintenance")
    assert in_force(detail={"policy": text}) == shipped | {"maintenance": 9}


def test_what_cannot_be_read_or_is_not_there_changes_nothing(tmp_path: Path) -> None:
    assert in_force(detail={"policy": None}) == in_force(detail={"policy": "?: ["}) == in_force()
    path = tmp_path / "nightly.yaml"
    path.write_text(OWN.format(name="nightly"))
    policy = shelf.load_file(path)
    path.unlink()
    assert shelf.text_of(policy) is None
