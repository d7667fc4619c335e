from pathlib import Path

import pytest

from tests.support.policies import GOOD, LEAST
from vmckpt.errors import PolicyError
from vmckpt.policy import loader

SHIPPED = {
    "balanced", "busy", "huge-memory", "low-downtime", "maintenance", "must-finish",
    "never-postcopy", "wan",
}  # fmt: skip


@pytest.fixture
def own(tmp_path: Path) -> Path:
    place = tmp_path / "own"
    place.mkdir()
    (place / "mine.yaml").write_text(GOOD)
    return place


def test_without_a_folder_there_are_the_shipped_ones() -> None:
    policies = loader.load_all(None)

    assert {one.name for one in policies} == SHIPPED
    assert all(one.shipped for one in policies)


def test_own_ones_are_beside_them_and_go_before_those_of_the_same_name(own: Path) -> None:
    (own / "b.yml").write_text(LEAST.replace("least", "balanced"))
    (own / "notes.txt").write_text("no policy")

    policies = {one.name: one for one in loader.load_all(own)}

    assert set(policies) == SHIPPED | {"mine"}
    assert policies["balanced"].file == str(own / "b.yml")
    assert not policies["balanced"].shipped
    assert policies["wan"].shipped


def test_the_shipped_folder_named_as_ones_own_changes_nothing() -> None:
    shipped = Path(loader.load_one("balanced", None).file).parent

    assert loader.load_all(shipped) == loader.load_all(None)


def test_a_broken_file_stops_everything_because_it_may_be_the_one_that_is_meant(own: Path) -> None:
    (own / "b.yaml").write_text("version: vmckpt/v1\nnam: b\n")

    with pytest.raises(PolicyError, match=r"b\.yaml:2: unknown key 'nam'; did you mean 'name'\?"):
        loader.load_all(own)
    assert {one.name for one in loader.survey(own).policies} == SHIPPED | {"mine"}
    assert len(loader.survey(own).problems) == 2


def test_two_files_of_the_same_name_are_a_problem_that_names_both(own: Path) -> None:
    (own / "other.yaml").write_text(LEAST.replace("least", "mine"))

    with pytest.raises(PolicyError) as caught:
        loader.load_all(own)
    told = f"{own}/other.yaml:2: name mine is already used by {own}/mine.yaml"
    assert str(caught.value) == told
    assert loader.problems([own])[own / "other.yaml"] == (told,)


def test_one_is_found_by_name_or_by_its_file(own: Path) -> None:
    assert loader.load_one("mine", own).name == "mine"
    assert loader.load_one(f"{own}/mine.yaml", None).name == "mine"
    with pytest.raises(PolicyError, match="no policy 'mime'; did you mean 'mine'"):
        loader.load_one("mime", own)
    with pytest.raises(PolicyError, match="No such file"):
        loader.load_one("mime.yaml", own)


def test_the_folder_is_found_in_the_order_documented(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inventory = tmp_path / "hosts.yaml"
    named, variable, beside, system = (tmp_path / name for name in ("a", "b", "policies", "c"))
    monkeypatch.setattr(loader, "SYSTEM", system)
    environment = {"VMCKPT_POLICIES": str(variable)}
    assert loader.folder(None, inventory, {}) is None
    for place in (named, variable, beside, system):
        place.mkdir()

    assert loader.folder(named, inventory, environment) == named
    assert loader.folder(None, inventory, environment) == variable
    assert loader.folder(None, inventory, {}) == beside
    assert loader.folder(None, None, {"VMCKPT_POLICIES": ""}) == system


def test_a_folder_that_was_named_and_is_missing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no such directory; check --policies"):
        loader.folder(tmp_path / "none", None, {})
    with pytest.raises(PolicyError, match="no such directory"):
        loader.folder(None, None, {"VMCKPT_POLICIES": "/nowhere/at/all"})
