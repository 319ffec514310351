"""Text that others wrote: published numbers, names in imported files, settings, terminals."""

from __future__ import annotations

import io
import json
import secrets
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest
from small import small
from sqlalchemy import update

from fatbench import whole_file
from fatbench.cli import app, streams
from fatbench.errors import SpecError
from fatbench.report.numbers.published import Lookup
from fatbench.report.tables import number_format
from fatbench.store.document import ExchangeError, parsed
from fatbench.store.rows import stored_text
from fatbench.store.schema import ROUND_METRICS
from fatbench.suite import files
from fatbench.suite.tables import Published

SUITE = small(
    name="own", seeds="[6]",
    tables="[{id: T1, title: t, rows: [method], values: {natural: natural}, published: {file: FILE, select: last,"
    " rows: {method: method}, values: {natural: natural}}}]",
)  # fmt: skip


def checked(folder: Path, text: str, name: str = "numbers.csv") -> None:
    """What `suite check` asks of a suite whose published numbers are this text."""
    from fatbench import report

    (folder / "numbers.csv").write_text(text, encoding="utf-8")
    (folder / "own.yaml").write_text(SUITE.replace("FILE", name))
    suite = files.load(str(folder / "own.yaml"))
    report.check(suite, suite.plan("paper"))


@pytest.mark.parametrize("cell", ["58.13 ±0.68", "58,13", "58.13%", "nan", "inf", "-", "58.13*"])
def test_a_published_number_that_is_none_is_refused_with_its_line(tmp_path: Path, cell: str) -> None:
    """Today's readers would leave it out, and the table would have no number of the paper."""
    with pytest.raises(SpecError) as refused:
        checked(tmp_path, f'method,natural,note\nSFAT,40.06,x\nFedAvg,"{cell}",not a number\n')
    said = f"{tmp_path / 'numbers.csv'}:3: natural: expected a number or nothing, got '{cell}'"
    assert str(refused.value) == said


def test_published_numbers_that_are_numbers_or_missing(tmp_path: Path) -> None:
    checked(tmp_path, "method,natural\nFedAvg,58.13\nSFAT,\nFAT, 1e1 \n")
    with pytest.raises(SpecError, match=r"numbers.csv:3: the labels of line 2 again: FedAvg"):
        checked(tmp_path, "method,natural\nFedAvg,58.13\nFedAvg ,58.20\n")
    for suite in ("sfat-cifar10", "adfl-mnist", "fedvkd-cifar10"):
        for table in files.load(suite).tables:
            assert table.published is None or isinstance(Lookup(table.published).published, Published)


@pytest.mark.parametrize("name", ["/etc/passwd", "../numbers.csv", "a/../../numbers.csv"])
def test_published_numbers_lie_in_the_suites_folder(tmp_path: Path, name: str) -> None:
    """What is in any other file would be printed with the mistake."""
    (tmp_path / "suites").mkdir()
    (tmp_path / "numbers.csv").write_text("secret\n")
    with pytest.raises(SpecError, match="give a file in the suite's folder, got") as refused:
        checked(tmp_path / "suites", "method,natural\n", name)
    assert "root:" not in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "code"),
    [("\\u001b]0;title\\u0007", "001B"), ("\\u202eevil", "202E"), ("\u202eevil", "202E"), ("\u009b2J", "009B"),
     ("a\\b", "0008"), ("\\u2066x", "2066"), ("\x7f", "007F")],
)  # fmt: skip
@pytest.mark.parametrize("line", ['{"runs": [{"host": "%s"}]}', '{"runs": [{"%s": 1}]}'])
def test_what_moves_a_cursor_or_turns_text_round_is_not_taken_in(line: str, text: str, code: str) -> None:
    with pytest.raises(ExchangeError, match=rf"^f:2: runs.0.*: a control character .U\+{code}.$"):
        parsed(line % text, "f:2")


def test_a_cell_of_a_csv_is_never_a_formula() -> None:
    texts = ["=1+1", "@SUM(1)", "+cmd", "-1+1", "a=b", "-", "-0.5", "+1e3"]
    lines = number_format.csv_text(pandas.DataFrame({"label": texts, "value": [-1.5] * len(texts)})).splitlines()
    assert lines == ["label,value", *(f"{t},-1.5" for t in ["'=1+1", "'@SUM(1)", "'+cmd", "'-1+1", *texts[4:]])]


@pytest.mark.parametrize("metric", ["=1+1", "+cmd", "-a", "@x"])
def test_an_outcome_of_a_foreign_database_is_no_formula(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]], metric: str
) -> None:
    from fatbench.store.stages import Store

    path = str(tmp_path / "x.db")
    with Store.open(path, create=True) as store:
        store.add_cell("a", {"seed": 1, "data": {"name": "digits"}, "test": 2})
        claimed = store.claim("a", f"{metric}-0a1b2c3d@1", suite="s", total=1, provenance={})
        store.commit(claimed, round=2, outcomes=(0, 2, b"\x80"))
    code, said, error = run("show", "--outcomes", "a", "--db", path)
    assert code == 0, error
    assert {line.split(",")[2] for line in said.splitlines()[1:]} == {f"'{metric}"}


@pytest.mark.parametrize("name", ["../../../x", "/tmp/x", "a/b", "..", ".hidden", "a\\b", '"a\\eb"', '"a\\u202eb"'])
def test_a_suite_s_name_is_no_path(tmp_path: Path, name: str) -> None:
    """Figures and exported files are called by it."""
    (tmp_path / "own.yaml").write_text(SUITE.replace("name: own", f"name: {name}", 1))
    with pytest.raises(SpecError, match=r"own.yaml:1: name: (expected a name without / and|a control char)"):
        files.load(str(tmp_path / "own.yaml"))


@pytest.mark.parametrize("label", ['"a\\e[2J"', '"a\\u202eb"', "a\u202eb"])
def test_a_suite_s_labels_are_text(tmp_path: Path, label: str) -> None:
    (tmp_path / "own.yaml").write_text(SUITE.replace("{FedAvg: {}}", f"{{{label}: {{}}}}"))
    with pytest.raises(SpecError, match=r"own.yaml:11: a\\(x1b|u202e).*: a control character .U\+(001B|202E)."):
        files.load(str(tmp_path / "own.yaml"))
    assert str(SpecError("a\x1b\u202e\n")) == "a\\x1b\\u202e\n"


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_a_terminal_of_few_letters_shows_what_it_can(monkeypatch: pytest.MonkeyPatch, encoding: str) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # what replaces it ends with the test
    streams.make_ready()
    monkeypatch.setattr(sys, "argv", ["fatbench", "show", "april-learning"])
    monkeypatch.setattr(app, "app", lambda **_: print("Dirichlet α ≥ 0.5 ─ ü"))
    with pytest.raises(SystemExit) as ended:
        app.main()
    out.flush()
    shown: Any = out.buffer
    letters = {"latin-1": "Dirichlet ? ? 0.5 ? ü", "ascii": "Dirichlet ? ? 0.5 ? ?"}[encoding]
    assert not ended.value.code and shown.getvalue().decode(encoding) == f"{letters}\n"


def test_a_temporary_file_is_none_that_somebody_else_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever guesses its name could have made a link there, which would be followed."""
    target = tmp_path / "precious"
    target.write_text("mine")
    file = tmp_path / "out.md"

    monkeypatch.setattr(secrets, "token_hex", lambda size: "guessed")
    part = file.with_name(".out.md.guessed.part")
    part.symlink_to(target)
    with pytest.raises(SpecError, match="File exists"):
        whole_file.write(file, "table")
    assert target.read_text() == "mine" and not file.exists() and part.is_symlink()


EVIL = "\x1b]0;t\x07\u202ex\x9b2J\ry"


def test_nothing_of_a_foreign_database_moves_the_cursor(url: str, run: Callable[..., tuple[int, str, str]]) -> None:
    """Names, hosts, errors, settings and keys of the provenance, which are JSON."""
    from fatbench.engine.rounds import Number
    from fatbench.store.stages import Store

    with Store.open(url, create=True) as store:
        store.add_cell("a", {"seed": 1, "algorithm": {"rounds": 1, "name": EVIL}, "data": {"name": EVIL}})
        where = {"host": EVIL, "device": EVIL, "versions": {EVIL: EVIL}, "note": EVIL, "plugin": [EVIL]}
        for stage in ("train", "natural-0a1b2c3d@1"):
            claimed = store.claim("a", stage, suite=EVIL, total=1, provenance={**where, "preset": EVIL})
            store.finish(claimed, [Number("evil", 0.5, 1, n=2)], round=1)
        broken = store.claim("a", "pgd-0a1b2c3d@1", suite=EVIL, total=1, provenance=where)
        with pytest.raises(ValueError, match="no control character"):
            store.commit(broken, numbers=[Number(EVIL, 0.5, 1)], round=1)
        store.fail(broken, f"{EVIL}\nline")
        with store.database.writing() as connection:
            connection.execute(update(ROUND_METRICS).values(metric=EVIL))
        read = store.runs(["a"])[-1]
        (spec,) = store.cells().values()
    assert read["error"] == "\\x1b]0;t\\x07\\u202ex\\x9b2J\\x0dy\nline" and read["host"] in read["error"]
    assert spec["data"]["name"] == read["note"] == r"\u001b]0;t\u0007\u202ex\u009b2J\ry"
    for command in ("status", "show a", "show a --outcomes", "show a --log", "check"):
        code, said, error = run(*command.split(), "--db", url)
        shown = said + error
        assert code != 1 or command in ("check", "show a --log"), shown
        assert not [c for c in EVIL[:-1] if c in shown and not c.isalnum() and c not in "];"], (command, shown)


@pytest.mark.parametrize("value", ['q"\\', "\\", "\\u001b", "\\\\x1b", "c:\\b", "a\n\tb", "😀 研究 e\u0301", "\\\x1b"])
@pytest.mark.parametrize("ascii", [True, False])
def test_text_of_a_database_is_otherwise_what_was_stored(value: str, ascii: bool) -> None:
    read = json.loads(stored_text(json.dumps({value: [value]}, ensure_ascii=ascii).encode()))
    assert read == ({value: [value]} if value != "\\\x1b" else {"\\\\u001b": ["\\\\u001b"]})
    assert stored_text(b"\\u001b c:\\b") == "\\u001b c:\\b"
