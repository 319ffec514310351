"""The checks of `make lint` on the documents' English find what they look for (docs/check_words.py)."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def check() -> Any:
    spec = importlib.util.spec_from_file_location(
        "check_words", Path(__file__).parent.parent / "docs" / "check_words.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sentences_are_found_and_counted(check: Any) -> None:
    text = (
        "# A heading is no sentence\n\nZhu et al. wrote `a b c` (see [one page](x.md)). **Two** words.\n\n"
        "```sh\nfatbench run\n```\n\n| a | b |\n|---|---|\n| 1. x | 2 |\n\n* first item\n  goes on\n* second - item\n"
        "1. third\n"
    )
    found = check.sentences(text)
    assert found == [
        "Zhu et al. wrote CODE (see one page).", "Two words.", "first item goes on", "second - item", "third"
    ]  # fmt: skip
    assert [check.words(sentence) for sentence in found] == [8, 2, 4, 2, 1]
    assert [m[:13] for m in check.long_sentences("one " * 25 + "end.")] == ["26 words: one"]


def test_old_words_are_found_with_their_lines(check: Any) -> None:
    assert list(check.old_words("# A\nThe protocol\nhas Rules.")) == [
        (2, "'protocol': write algorithm"), (3, "'Rules': write aggregator; of imports: contract")
    ]  # fmt: skip
    assert not list(check.old_words("prototype, ruler, http/protocol, A picturesque plane"))
    assert [m for _, m in check.old_words(check.split("VerdictsOf"))] == ["'Verdicts': write outcome"]
    assert list(check.banned("What is done\nis not done again.")) == [
        "reads as translated: 'what is done is not done again'"
    ]


def test_dead_links_and_public_names_are_found(check: Any, tmp_path: Path) -> None:
    page = tmp_path / "a.md"
    page.write_text("# One two\n[a](a.md#one-two) [b](#gone) [c](b.md) [d](https://x.org/y) `[e](e.md)`\n")
    assert list(check.dead_links(page)) == ["leads nowhere: #gone", "leads nowhere: b.md"]
    module = tmp_path / "lanes.py"
    module.write_text("def f(rule, _a): pass\nclass _P: pass\nclass Q: pass\n")
    assert list(check.public_names(module)) == [(1, "lanes"), (1, "f"), (1, "rule"), (1, "_a"), (3, "Q")]


def test_comments_and_docstrings_are_found_with_their_lines(check: Any, tmp_path: Path) -> None:
    module = tmp_path / "m.py"
    module.write_text('"""Head."""\nx = "text"  # why\n\n\ndef f():\n    """What f does.\n\n    More.\n    """\n')
    assert sorted(check.remarks(module)) == [(1, "Head."), (2, " why"), (6, "What f does.\n\n    More.\n    ")]
