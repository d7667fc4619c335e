"""Which lab commands use."""

from pathlib import Path

import pytest

from vmckpt.errors import BadInput
from vmckpt_lab import current


def running(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).mkdir()
        (folder / name / "hosts.yaml").touch()
    (folder / "half-made").mkdir()
    return folder


def test_one_lab_needs_no_name(tmp_path: Path) -> None:
    labs = running(tmp_path, "one")
    assert current.inventory({}, labs) == labs / "one/hosts.yaml"
    assert current.inventory({"VMCKPT_LAB": "one"}, labs) == labs / "one/hosts.yaml"


def test_several_labs_are_named_and_one_is_selected_by_the_variable(tmp_path: Path) -> None:
    labs = running(tmp_path, "one", "two")
    with pytest.raises(BadInput, match=r"several labs are running \(one, two\)") as caught:
        current.inventory({}, labs)
    assert (
        caught.value.hint == "select one with VMCKPT_LAB, like VMCKPT_LAB=one, or with --inventory"
    )
    assert current.inventory({"VMCKPT_LAB": "two"}, labs) == labs / "two/hosts.yaml"


def test_a_lab_that_is_not_running_is_not_replaced_by_another(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="VMCKPT_LAB is two, but no such lab is running"):
        current.inventory({"VMCKPT_LAB": "two"}, running(tmp_path, "one"))


def test_without_a_lab_the_variable_means_nothing(tmp_path: Path) -> None:
    assert current.inventory({"VMCKPT_LAB": "two"}, running(tmp_path)) is None
