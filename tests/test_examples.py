"""The examples in docstrings run and print what they say."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from fatbench.methods import aggregators, attacks
from fatbench.methods.algorithms import fedavg

DOCUMENTED = [
    (aggregators, aggregators.sfat),
    (attacks, attacks.pgd),
    (fedavg, fedavg.fedavg),
]


@pytest.mark.parametrize(("module", "function"), DOCUMENTED, ids=["sfat", "pgd", "fedavg"])
def test_the_example_prints_what_it_says(module: ModuleType, function: object) -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(function, module=module)
    assert example.examples
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(example, out=printed.append)
    assert result.failed == 0, "".join(printed)
