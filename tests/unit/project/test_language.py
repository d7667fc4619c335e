"""Messages, docstrings, comments and pages keep to docs/style.md, as far as a pattern can see."""

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT

LANGUAGE: dict[str, Any] = runpy.run_path(str(ROOT / "scripts/language"))


def test_no_text_has_a_word_that_the_page_on_style_replaces() -> None:
    found = LANGUAGE["hits"](ROOT / one for one in (*LANGUAGE["PRODUCT"], *LANGUAGE["PAGES"]))

    assert [f"{one.text.path}:{one.text.line}: {one.word} ({one.hint})" for one in found] == []


@pytest.mark.parametrize(
    "line",
    [
        'print("nobody answers at alpha")',
        'print(f"{guest} stands still on {host}")',
        "# Whoever asks gets it.",
        'def one() -> None:\n    """Wait for a host that is told so."""',
    ],
)
def test_a_word_to_replace_is_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"{line}\n")
    words = [
        pattern.search(text.words) is not None
        for text in LANGUAGE["texts"]([file])
        for pattern, _ in LANGUAGE["WORDS"]
    ]

    assert any(words)


def test_each_exception_is_still_needed() -> None:
    needed = {
        (str(text.path.relative_to(ROOT)), match[0].lower())
        for text in LANGUAGE["texts"](
            ROOT / one for one in (*LANGUAGE["PRODUCT"], *LANGUAGE["PAGES"])
        )
        for match in LANGUAGE["ANY"].finditer(text.words)
    }

    assert set(LANGUAGE["ALLOWED"]) - needed == set()


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    first = LANGUAGE["sample"](7)

    assert len(first) == 200
    assert LANGUAGE["sample"](7) == first
