"""The examples in docstrings and on pages run and print what they say."""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fatbench
from fatbench.methods.aggregators import samples
from fatbench.methods.algorithms import ALGORITHMS
from fatbench.testing import equal, local, rounds, small_problem

ROOT = Path(__file__).parent.parent
# every module with an example; those of the functions of `import fatbench` need the results of a run
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in (ROOT / "fatbench").rglob("*.py")
    if ">>> " in file.read_text(encoding="utf-8")
)
BY_USERS = [name for name in MODULES if name.startswith(("fatbench.api.", "fatbench.attacks"))]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "results").glob("*.md")])
BLOCKS = {  # page -> its blocks of Python
    str(page.relative_to(ROOT)): blocks
    for page in PAGES
    if (blocks := re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL))
}


def examples(module: str) -> list[doctest.DocTest]:
    found = doctest.DocTestFinder().find(importlib.import_module(module))
    return [test for test in found if test.examples]


def run(test: doctest.DocTest) -> None:
    printed: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=printed.append)
    assert result.failed == 0, "".join(printed)


@pytest.mark.parametrize("module", [name for name in MODULES if name not in BY_USERS])
def test_the_examples_of_a_module_print_what_they_say(module: str) -> None:
    tests = examples(module)
    assert tests
    for test in tests:
        run(test)


@pytest.mark.slow
def test_the_examples_of_functions_for_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forks: None) -> None:
    """In a folder with what a clone has; `run` first, because the others read what it stored."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    shutil.copy(ROOT / "results" / "fat-byzantine-cpu.jsonl.xz", tmp_path / "results")
    shutil.copytree(ROOT / "results" / "weights", tmp_path / "results" / "weights")
    tests = [test for module in BY_USERS for test in examples(module)]
    for test in sorted(tests, key=lambda test: not test.name.endswith(".run")):
        run(test)
    named = {test.name.rsplit(".", 1)[1] for test in tests}
    assert named >= {
        "suites", "plan", "run", "results", "table", "evaluate", "compare", "partition", "aggregate", "load_model",
        "make_suite", "names",
    }  # fmt: skip


def test_every_block_of_a_page_is_run() -> None:
    """Those of docs/python.md by a kernel, see test_api.py; the others here, with what the page says that they need."""

    class Net(nn.Module):
        def forward(self, x: Any) -> Any:
            return x

    needed = {
        "README.md": {},
        "docs/evaluate.md": {"Net": Net, "prepare": lambda x: x + 1},
        "docs/functions.md": {"mine": lambda updates, context, *, top: None},
    }
    assert BLOCKS.keys() == {"docs/python.md", *needed}
    spaces = {page: dict(names) for page, names in needed.items()}
    for page, space in spaces.items():
        for block in BLOCKS[page]:
            exec(compile(block, page, "exec"), space)
    assert spaces["docs/evaluate.md"]["Prepared"]()(1) == 2
    (refuse,) = spaces["docs/functions.md"]["AGGREGATORS"]["mine"].refuse
    assert "more than half" in refuse(type("Cell", (), {"cohort": 3}), top=2)
    on = small_problem(images_per_client=8)
    how = {"rounds": 2, "aggregator": samples, "local": local()}
    shown, ours = (
        [result for result, _ in rounds(on, functools.partial(algorithm, **how))]
        for algorithm in (spaces["docs/functions.md"]["keeps_normalisation"], ALGORITHMS["fedbn"])
    )
    assert equal(shown, ours) and shown[1].own
    for block in BLOCKS["docs/python.md"]:
        compile(block, "docs/python.md", "exec")


def calls(text: str) -> list[ast.Call]:
    """The calls of `fatbench` functions that a text shows: "fatbench.run("x", preset="smoke")"."""
    found = []
    for start in (match.start() for match in re.finditer(r"(?<![\w.])fatbench\.(attacks\.|Table\.)?\w+\(", text)):
        ends = (start + match.end() for match in re.finditer(r"\)", text[start : start + 400]))
        for end in ends:
            try:
                node = ast.parse(text[start:end], mode="eval").body
            except SyntaxError:
                continue
            assert isinstance(node, ast.Call)
            found.append(node)
            break
    return found


def binds(call: ast.Call) -> bool:
    """Whether the function takes the arguments; "..." stands for any."""
    function = eval(ast.unparse(call.func), {"fatbench": fatbench})
    if any(isinstance(value, ast.Constant) and value.value is ... for value in call.args):
        return True
    starred = any(isinstance(value, ast.Starred) for value in call.args) or any(k.arg is None for k in call.keywords)
    signature = inspect.signature(function)
    values = {keyword.arg: None for keyword in call.keywords if keyword.arg is not None}
    bind = signature.bind_partial if starred else signature.bind
    try:
        bind(*[None for value in call.args if not isinstance(value, ast.Starred)], **values)
    except TypeError:
        return False
    return True


def test_a_call_with_a_wrong_argument_is_seen() -> None:
    right, wrong, twice, missing = calls(
        'fatbench.run("x", preset="smoke") fatbench.run("x", pre="x") fatbench.make_suite("x", suite={}) fatbench.run()'
    )
    assert binds(right) and not binds(wrong) and binds(twice) and not binds(missing)
    assert [ast.unparse(call) for call in calls("`fatbench.tests(suite)` and fatbench.x(f(1), [2])")] == [
        "fatbench.tests(suite)",
        "fatbench.x(f(1), [2])",
    ]


SHOWING = [*PAGES, *(ROOT / "fatbench").rglob("*.py")]


@pytest.mark.parametrize("file", SHOWING, ids=lambda file: str(file.relative_to(ROOT)))
def test_calls_that_a_page_or_a_docstring_shows_have_their_arguments(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        tree = ast.parse(text)
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        text = "\n".join(filter(None, map(ast.get_docstring, owners)))
    wrong = [ast.unparse(call) for call in calls(text) if not binds(call)]
    assert not wrong
