"""Expressions in docstrings, by hand."""

from __future__ import annotations

import re

import pytest

from fatbench.suite.formulas import UNKNOWN, evaluate, lines

NAMES = {"a": 3, "b": 0.5, "none": None, "unknown": UNKNOWN, "word": "cat", "words": ("cat", "dog")}


def value(text):
    return evaluate(text, lambda *path: NAMES[".".join(path)])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + 2 * b - 1", 3.0),
        ("a // 2 + a % 2 + a ** 2", 11),
        ("-a / 2", -1.5),
        ("2 * (a >= 3) + (a < 3)", 2),
        ("none or 7", 7),
        ("a or 7", 3),
        ("'cat' in words and word != 'dog'", True),
        ("'cow' not in words", True),
        ("none is None", True),
        ("not none", True),
        ("min(a, 2) + max(1, b)", 3),
        ("max(numbers('1,9,4'))", 9),
        ("round(a * b)", 2),
        ("4 if a > 2 else 5", 4),
        ("unknown + 1", UNKNOWN),
        ("none + 1", UNKNOWN),
        ("none > 1", UNKNOWN),
        ("not unknown > 1", UNKNOWN),
        ("unknown is None", UNKNOWN),
        ("unknown > 1 or a > 2", True),
        ("unknown > 1 or a > 3", UNKNOWN),
        ("unknown > 1 and a > 2", UNKNOWN),
        ("unknown > 1 and a > 3", False),
        ("1 if unknown else 2", UNKNOWN),
        ("max(numbers('server'))", UNKNOWN),
    ],
)
def test_values(text, expected):
    assert value(text) is expected if expected is UNKNOWN else value(text) == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a +", "'a +' is not an expression"),
        ("[a]", "'[a]' is not allowed in an expression"),
        ("print(a)", "'print(a)' is not allowed in an expression"),
        ("a < 2 < 3", "'a < 2 < 3' is not allowed in an expression"),
        ("a.__class__()", "'a.__class__()' is not allowed in an expression"),
    ],
)
def test_what_is_no_expression(text, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        value(text)


def test_lines_of_a_docstring_go_on_where_they_are_indented():
    doc = "Train for long.\n\nTrain: 1 +\n    2\nTrain: 3\nRefuse if a > 1:\n    too\n  many\nEnd."
    assert lines(doc, "Train:") == ["1 + 2", "3"]
    assert lines(doc, "Refuse if") == ["a > 1: too many"]
