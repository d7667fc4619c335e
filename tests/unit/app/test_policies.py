"""Policies as the operator names them: by name, or as a file."""

from pathlib import Path

import pytest

from tests.support.policies import GOOD, LEAST
from vmckpt.app import policies
from vmckpt.errors import PolicyError
from vmckpt.inventory import Inventory


@pytest.fixture
def inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inventory:
    """One that has a folder of policies beside it."""
    monkeypatch.delenv("VMCKPT_POLICIES", raising=False)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies/mine.yaml").write_text(GOOD)
    return Inventory(path=tmp_path / "hosts.yaml", hosts={}, observer=None)


def test_all_are_there_and_the_wanted_one_by_its_name(inventory: Inventory) -> None:
    found, wanted = policies.load_policies(inventory)
    assert wanted is None
    assert {"mine", "balanced"} <= {one.name for one in found}
    assert policies.load_policies(inventory, wanted="mine") == (found, "mine")
    with pytest.raises(PolicyError, match="no policy 'mien'"):
        policies.load_policies(inventory, wanted="mien")


def test_a_file_is_the_only_one_whatever_is_wrong_beside_it(
    inventory: Inventory, tmp_path: Path
) -> None:
    (tmp_path / "policies/wrong.yaml").write_text("version: vmckpt/v9\n")
    (tmp_path / "own.yaml").write_text(LEAST)
    (found,), wanted = policies.load_policies(inventory, wanted=str(tmp_path / "own.yaml"))
    assert (found.name, wanted) == ("least", "least")


def test_a_broken_one_stops_what_begins_and_not_what_goes_on(
    inventory: Inventory, tmp_path: Path
) -> None:
    (tmp_path / "policies/wrong.yaml").write_text("version: vmckpt/v9\n")
    with pytest.raises(PolicyError, match=r"wrong\.yaml"):
        policies.load_policies(inventory)
    seen = policies.survey_policies(inventory)
    assert "mine" in {one.name for one in seen.policies}
    assert "wrong.yaml" in (seen.wrong or "")
