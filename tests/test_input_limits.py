"""What a person writes is refused before it is expanded: one line, at once, exit 2."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import result_files

from fatbench.errors import SpecError
from fatbench.settings import shown_url
from fatbench.suite import asked, files, trees

HEAD = """
name: s
title: T
base:
  data: digits
  partition: {name: shah, clients: 2, skew: 2}
  model: {name: small_cnn}
  algorithm: {name: fedavg, rounds: 1, local: {epochs: 1, batch: 16, lr: 0.1, objective: standard}, aggregator: samples}
presets: {paper: {}}
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(run: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """The one line that the program answers with, within a few seconds of CPU."""

    def said(*arguments: str) -> str:
        start = time.process_time()
        code, out, err = run(*arguments)
        assert time.process_time() - start < 5
        assert (code, out, len(err.splitlines())) == (2, "", 1) and len(err) < 500, err
        return err

    return said


def bomb(levels: int) -> str:
    """9 ** levels values in a few lines."""
    rows = ["x0: &x0 [a, a, a, a, a, a, a, a, a]"]
    rows += [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9)}]" for i in range(1, levels)]
    return "\n".join(rows) + "\n"


def grid(axes: int, labels: int) -> str:
    rows = [f"  a{i}: {{{', '.join(f'l{k}: {{}}' for k in range(labels))}}}" for i in range(axes)]
    return HEAD + "axes:\n" + "\n".join(rows) + "\n"


SUITES = {
    "aliases": (HEAD + bomb(12), "more than 1000000 values once its aliases are expanded"),
    "grid": (grid(7, 10), "preset 'paper': 10000000 cells, at most 200000 are allowed"),
    "included": (grid(7, 10) + "grid: {product: [], include: [{"
                 + ", ".join(f"a{i}: [{', '.join(f'l{k}' for k in range(10))}]" for i in range(7)) + "}]}\n",
                 "10000001 cells"),
    "seeds": (HEAD + 'seeds: "0-999999999"\n', "more than 100000 seeds"),
    "seeds of a grid": (grid(4, 10) + 'seeds: "0-99"\n', "1000000 cells"),
    "lists": (HEAD + "x: " + "[" * 2000 + "]" * 2000 + "\n", "nested more than 100 levels deep"),
    "mappings": ("\n".join(" " * i + f"k{i}:" for i in range(2000)) + " 1\n", "nested more than 100 levels deep"),
    "lists that end the process": ("x: " + "[" * 200_000 + "]" * 200_000 + "\n", "nested more than 100 levels deep"),
    "digits": (HEAD + "seeds: [" + "9" * 1_000 + "]\n", "a number of 1000 digits; at most 40 are allowed"),
    "digits that Python refuses": (HEAD + "seeds: [" + "9" * 100_000 + "]\n", "invalid YAML: Exceeds"),
    "a day of no month": (HEAD + "seeds: 2024-13-45\n", "invalid YAML: month must be"),
    "a long file": ("a: 1 #" + "x" * (16 * 2**20), "characters; at most"),
}  # fmt: skip


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.promise("Input", "A suite with too many cells is refused before it is expanded")
def test_a_suite_that_stands_for_too_much_is_refused(name, place, refused):
    text, message = SUITES[name]
    Path("s.yaml").write_text(text)
    said = refused("plan", "suite", "s.yaml")
    assert message in said and "s.yaml" in said


def test_what_is_at_the_bounds_is_read(place):
    levels = trees.LEVELS - 1  # and one of the number
    deep = "{a: " * levels + "1" + "}" * levels + "\n"
    assert list(trees.parse(deep, Path("a.yaml"))) == ["a"]
    with pytest.raises(SpecError, match="nested"):
        trees.parse("{a: " + deep.strip() + "}\n", Path("a.yaml"))
    digits = "9" * trees.DIGITS
    found = trees.parse(f"a: {digits}\nb: &b [1]\nc: *b\n", Path("a.yaml"))
    assert found == {"a": int(digits), "b": [1], "c": [1]}


@pytest.mark.parametrize("seeds", ["0-999999999", "0-" + "9" * 100_000, "9" * 100_000, "0-1,0-200000", "٣", "1-", "-"])
def test_seeds_are_refused_before_they_are_counted(seeds, place, refused):
    assert "--seeds: " in refused("plan", "suite", "sfat-cifar10", "--smoke", "--seeds", seeds)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("a=", "expected a value after 'a='"),
        ("a=)", "expected a value after 'a='"),
        ("a==!=", "expected a value"),
        ("aggregator>", "expected a value after 'aggregator>'"),
        ("(" * 5000 + "aggregator=sfat" + ")" * 5000, "nested too deeply"),
        ("not " * 5000 + "aggregator=sfat", "nested too deeply"),
    ],
    ids=lambda text: text[:12],
)
def test_filters(where, message, place, refused):
    plan = ("plan", "suite", "sfat-cifar10", "--smoke")
    assert message in refused(*plan, "-k", where)
    assert message in refused(*plan, "-k", "aggregator=sfat", "-k", where)


@pytest.mark.parametrize("deep", ["not " * 100 + "aggregator=sfat", "(" * 100 + "aggregator=sfat" + ")" * 100])
def test_what_is_just_not_too_deep_can_be_asked(deep, place):
    assert files.load("sfat-cifar10").plan("smoke", where=deep).cells


# --- addresses of databases --------------------------------------------------------------------------------------

SECRETS = [
    "postgresql://u:geh@eim@h/x",
    "postgresql://u:geh@eim/2@h:5432/x?a=b",
    "postgresql://u@v:geh@eim@h/x",
    "postgresql://:geh@eim@h/x",
    "postgresql://u:geh\n@eim@h/x",
    "password=geh@eim",
    "host=h user=u password = 'geh eim' dbname=x",
    "HOST=h Password=geh@eim",
    "dbname=x sslmode=require password=geh\\'eim",
]


@pytest.mark.parametrize("url", SECRETS)
@pytest.mark.promise("Input", "No message shows a password")
def test_no_part_of_a_password_is_shown(url, place, refused):
    said = [shown_url(url)]
    assert "***" in said[0]
    said += [refused(*words, "--db", url) for words in (["status"], ["export"], ["import", "x.jsonl"], ["check"])]
    if "://" in url:  # in the place of another name
        said += [refused(*words, url) for words in (["status", "a"], ["show"], ["report"], ["new", "aggregator"])]
        assert "got unexpected extra argument" in said[5]
    assert not [one for one in said if "geh" in one or "eim" in one]
    assert list(place.iterdir()) == []


# --- imports -----------------------------------------------------------------------------------------------------


@pytest.mark.promise("Input", "A refused import creates no database, and of several files it imports none")
def test_a_refused_import_leaves_no_database_and_several_files_are_all_checked_first(place, refused, run):
    results = Path(__file__).parent.parent / "results" / "sfat-fp32-cpu.jsonl.xz"
    header, first, second, *_ = (line.strip() for line in result_files.lines(results))
    two = header.replace('"cells":5', '"cells":2')
    Path("good.jsonl").write_text("\n".join([header.replace('"cells":5', '"cells":1'), first]) + "\n")
    Path("bad.jsonl").write_text("\n".join([two, second, second.replace('"round":', '"round":-', 1)]) + "\n")
    before = sorted(place.iterdir())
    said = refused("import", "good.jsonl", "bad.jsonl", "--db", "x.db")
    assert said.startswith("fatbench: bad.jsonl:3: stages.")
    assert sorted(place.iterdir()) == before
    code, out, err = run("import", "good.jsonl", "bad.jsonl", "--db", "x.db", "--skip-bad")
    assert code == 0
    assert err.startswith("fatbench: skipped: bad.jsonl:3: stages.") and len(err.splitlines()) == 1
    assert [line.partition(" new cells")[0] for line in out.splitlines()] == [
        "good.jsonl: 1 cells, 1", "bad.jsonl: 1 cells, 1"]  # fmt: skip
    assert out.endswith(", 1 invalid lines skipped\n")


def test_specs_from_elsewhere_are_checked_like_those_of_a_suite():
    plan = files.load("sfat-cifar10").plan("smoke")
    spec = plan.cells[0].spec
    assert asked.identity(spec) == plan.cells[0].id
    for change, message in (
        ({"seed": "x"}, "spec: seed: should be a valid integer"),
        ({"colour": 1}, "spec: colour: 'cell' has no setting 'colour'"),
        ({"model": {**spec["model"], "name": "nim"}}, "no model is named 'nim' (did you mean 'nin'?)"),
        ({"algorithm": {**spec["algorithm"], "rounds": 10**400}}, ""),
        ({"model": None}, "spec: model: expected a mapping with a name, got None"),
        ({"evaluated": {}}, "spec: evaluated: name: Field required"),
    ):
        try:
            identity = asked.identity({**spec, **change})
        except SpecError as error:
            assert message in str(error)
        else:
            assert not message and identity != plan.cells[0].id
