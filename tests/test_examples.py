"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
import sys
from types import ModuleType

import pytest

from fatbench.methods import aggregators, attacks
from fatbench.methods.algorithms import ALGORITHMS

DOCUMENTED = [
    (aggregators, aggregators.AGGREGATORS["sfat"]),
    (attacks, attacks.ATTACKS["pgd"]),
    (sys.modules[ALGORITHMS["fedavg"].__module__], ALGORITHMS["fedavg"]),
]


@pytest.mark.parametrize(("module", "function"), DOCUMENTED, ids=["sfat", "pgd", "fedavg"])
def test_the_example_prints_what_it_says(module: ModuleType, function: object) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(function, module=module)
    assert example.examples
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)
