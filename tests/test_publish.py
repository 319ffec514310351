"""`fatbench import --as-published`: a paper's table beside the numbers of one's own suite."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from crew import SUITE

from fatbench.suite import publish

Run = Callable[..., tuple[int, str, str]]
MINE = SUITE.strip().replace("name: crew", "# of my own\nname: mine")
MINE = MINE.replace("  aggregator: samples", "  aggregator: &mean samples  # as in [1]")
PAPER = """Pace,Clean,FGSM,Params
slow,58.13 ±0.68,**40.06** (0.62),11M
usual,63.36 \\pm 0.07,-,11M
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    values = "{natural: natural, FGSM: fgsm}"
    (tmp_path / "mine.yaml").write_text(MINE.replace("{natural: natural}}", f"{values}}}") + "\n")
    (tmp_path / "paper.csv").write_text(PAPER)
    return tmp_path


def test_a_paper_s_table_becomes_the_published_column_of_a_suite_in_one_command(run: Run, place: Path) -> None:
    before = (place / "mine.yaml").read_text()
    code, out, said = run("import", "paper.csv", "--as-published", "mine.yaml", "--select", "last")
    assert (code, out) == (0, "mine.yaml: table A has 3 published numbers in 2 rows, from published/mine-a.csv\n")
    assert said == "fatbench: columns that the table does not have: Params\n"
    assert (place / "published" / "mine-a.csv").read_text().splitlines() == [
        "pace,natural,natural_std,FGSM,FGSM_std", "slow,58.13,0.68,40.06,0.62", "usual,63.36,0.07,,"
    ]  # fmt: skip
    after = (place / "mine.yaml").read_text()
    changed = [(a, b) for a, b in zip(before.splitlines(), after.splitlines(), strict=True) if a != b]
    assert len(changed) == 1 and changed[0][1].startswith(changed[0][0][:-1])  # one table, and nothing else
    shown = json.loads(run("report", "mine.yaml", "--format", "json")[1])["tables"][0]["rows"]
    found = {row["key"]["pace"]: row["published"] for row in shown}
    mean, std = found["slow"]["natural"]["mean"], found["slow"]["fgsm"]["std"]
    assert (mean, std) == (pytest.approx(0.5813), pytest.approx(0.0062))
    assert not found["fast"]


def test_rows_that_are_refused_are_named_and_nothing_is_written(run: Run, place: Path) -> None:
    (place / "paper.csv").write_text(f'{PAPER}slwo,1,2,x\nslow,1,2,x\nfast,"58,13",2,x\n')
    before = (place / "mine.yaml").read_text()
    asked = ("import", "paper.csv", "--as-published", "mine.yaml")
    refused = (
        "fatbench: refused: paper.csv:4: 'slwo' is not a label of 'pace' (did you mean 'slow'?)\n"
        "fatbench: refused: paper.csv:5: a second row of slow\n"
        "fatbench: refused: paper.csv:6: '58,13' in column 'Clean' is no number\n"
    )
    code, out, said = run(*asked)
    assert (code, out) == (2, "") and said.startswith(refused) and "3 rows are refused, and nothing was written" in said
    assert (place / "mine.yaml").read_text() == before and not (place / "published").exists()
    code, out, said = run(*asked, "--skip-bad")
    assert code == 0 and "3 published numbers in 2 rows" in out and said.startswith(refused)
    assert run(*asked)[2] == "fatbench: mine.yaml: table A has published numbers already: published/mine-a.csv\n"


def test_records_of_robustbench_are_read_and_seeds_are_a_row(run: Run, place: Path) -> None:
    for seed, clean in ((1, "60.00"), (2, "64.00")):
        name = f"crew, paper: fast, seed {seed}"
        record = {"name": name, "clean_acc": clean, "autoattack_acc": "30.00", "eps": "8/255"}
        (place / f"{seed}.json").write_text(json.dumps(record))
    assert run("import", "1.json", "2.json", "--as-published", "mine.yaml")[0] == 0
    assert (place / "published" / "mine-a.csv").read_text() == "pace,natural,natural_std\nfast,62,2.828427\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("paper.csv", "--as-published", "sfat-cifar10", "--table", "T3"), "table T3 has published numbers already"),
        (("paper.csv", "--as-published", "mine.yaml", "--table", "B"), "mine.yaml has no table 'B' (known: A)"),
        (("paper.csv", "--as-published", "mine.yaml", "--label", "x"), "--label: expected PAPER=OURS"),
        (("paper.csv", "--as-published", "mine.yaml", "--unit", "cm"), "--unit: expected percent or plain, got 'cm'"),
        (
            ("paper.csv", "--as-published", "mine.yaml", "--select", "lst"),
            "no checkpoint is named 'lst' (did you mean 'last'?)",
        ),
        (("paper.csv", "--table", "A"), "--table: only with --as-published SUITE"),
        (("no.csv", "--as-published", "mine.yaml"), "no.csv: No such file or directory"),
        (("odd.csv", "--as-published", "mine.yaml"), "odd.csv:2: 1 values under 2 column names"),
        (("none.csv", "--as-published", "mine.yaml"), "no column has labels of the axis 'pace' (slow, usual, fast)"),
        (("one.json", "--as-published", "mine.yaml"), "one.json: not one of RobustBench's records"),
    ],
)
def test_what_cannot_be_taken(run: Run, place: Path, arguments: tuple[str, ...], message: str) -> None:
    (place / "odd.csv").write_text("pace,natural\nslow\n")
    (place / "none.csv").write_text("who,natural\nme,1\n")
    (place / "one.json").write_text('{"name": 1}')
    before = (place / "mine.yaml").read_text()
    code, out, said = run("import", *arguments)
    assert (code, out) == (2, "") and message in said, said
    assert (place / "mine.yaml").read_text() == before and not (place / "published").exists()


@pytest.mark.parametrize(
    ("text", "value"),
    [("58.13", (58.13, None)), (" 58.13%", (58.13, None)), ("58.13 ± 0.68", (58.13, 0.68)), ("58.1(0.7)", (58.1, 0.7)),
     ("58.13% +/- 0.5%", (58.13, 0.5)), (".5", (0.5, None)), ("-", None), ("", None), ("n/a", None),
     ("*58*†", (58.0, None))],
)  # fmt: skip
def test_numbers_as_papers_print_them(text: str, value: tuple[float, float | None] | None) -> None:
    assert publish.number(text) == value
