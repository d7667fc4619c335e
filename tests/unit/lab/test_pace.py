import pytest

from vmckpt.errors import BadInput
from vmckpt_lab import pace


@pytest.mark.parametrize(("text", "value"), [("1", 1.0), ("0.25", 0.25), ("0.01", 0.01)])
def test_a_pace_is_a_share_of_the_full_one(text: str, value: float) -> None:
    assert pace.parse(text) == value


@pytest.mark.parametrize("text", ["x", "", "0", "-1", "2", "nan"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="is not a valid pace"):
        pace.parse(text)
