"""Tables as a paper prints them: committed results in two columns, compiled; what is said under them; what is refused.

Every number here is one of `results/`; the layouts of made-up tables are in test_report.py.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import latex_runs
import pytest
import test_readme
from small import small

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def adfl(committed: Mapping[str, Any]) -> str:
    return str(committed["adfl-mnist-jpeg-cpu"].database.path)


def test_options_of_a_table(run: Run, adfl: str) -> None:
    """Only the table asked for, one digit, and under it what report.notes says."""
    shown = {}
    for notes in ("full", "short", "none"):
        options = f"--table classes -c report.digits=1 -c report.notes={notes} --format latex"
        code, shown[notes], _ = run("report", "adfl-mnist", *options.split(), "--db", adfl)
        assert code == 0
    assert shown["full"].count(r"\label{") == 1 and "tab:adfl-mnist-classes" in shown["full"]
    assert re.search(r" & 52\.0 & ", shown["none"]) and r"$\pm$37.9}" in shown["none"]
    assert re.search("^% Machine: ", shown["full"], re.MULTILINE) and "Machine: " not in shown["short"]
    assert "1 of 30 paired t tests over seeds have $p < 0.05$ after Holm's correction" in shown["short"]
    assert len(re.findall("^% Paired: .*AdFL - FedAvg, ", shown["full"], re.MULTILINE)) == 30  # a comment each
    assert r"\textit{Numbers}" not in shown["none"] and "commit" in shown["none"]
    assert max(text.count(r"}: ") for text in shown.values()) == 3  # notes in the float
    for text in shown.values():  # the caption says what the number is, whatever stands below
        assert "Mean $\\pm$ sample standard deviation over 10 seeds (0 to 9)." in text
        assert "Training numbers: after the last round (30)." in text
        assert "JPEG-CPU PRESET - not comparable with published numbers" in text


@pytest.mark.nightly
@pytest.mark.nightly
@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
@pytest.mark.parametrize("name", latex_runs.SET_UPS)
def test_every_committed_table_in_the_classes_of_papers(name: str) -> None:
    """No error, nothing sticks out, no label twice; see `latex_runs`."""
    done = subprocess.run([sys.executable, latex_runs.__file__, "--set-up", name], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    if "left out" in done.stdout:
        pytest.skip(done.stdout)


def test_five_attacks_are_one_float(run: Run, tmp_path: Path) -> None:
    """Two axes, five headings, five seeds: in a column of two the spreads stand below their numbers."""
    db, file = str(tmp_path / "f.db"), tmp_path / "t.tex"
    assert run("import", str(ROOT / "results" / "sfat-fashion-cpu.jsonl.xz"), "--db", db)[0] == 0
    options = ("report", "sfat-fashion", "--format", "latex", "-c", "report.published=none", "--db", db)
    for width, beside in (("text", True), ("column", False)):
        assert run(*options, "--width", width, "-o", str(file))[0] == 0
        text = file.read_text(encoding="utf-8")
        assert text.count(r"\begin{tabular}") == text.count(r"\begin{table") == 1
        assert r"$\pm$1.84" in text and (r"{\scriptsize\,$\pm$1.84}" in text) == beside
        assert text.count("[3/5]") == 2 + 1  # at a row's label, and what it means


def test_letters_that_latex_loses_are_said(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tables = "[{id: A, title: 中文 ½, rows: [method], values: {natural: natural}}]"
    Path("heads.yaml").write_text(small(name="heads", tables=tables), encoding="utf-8")
    _, out, err = run("report", "heads.yaml", "--table", "A", "--format", "latex")
    assert r"\caption{?? \,1/2." in out
    assert err.count('fatbench: no glyph in pdfLaTeX, printed as "?": 中 文\n') == 1


@pytest.mark.nightly
def test_an_author_s_way_to_a_paper(tmp_path: Path) -> None:
    """docs/paper-tables.md as it is written: every command, then its document in two columns, compiled twice."""
    page = (ROOT / "docs" / "paper-tables.md").read_text(encoding="utf-8")
    (document,) = re.findall(r"^```latex\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    commands = test_readme.examples(page)
    assert [command.split()[1] for command, _ in commands] == ["plan", "run", "report", "plot", "report"]
    for command, shown in commands:
        test_readme.run(command, tmp_path, shown)
    (tmp_path / "paper.tex").write_text(document)
    if not shutil.which("pdflatex"):
        pytest.skip("the commands ran; pdflatex is not installed")
    for _ in range(2):
        command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120, check=False)
        said = done.stdout.decode("utf-8", "replace")
        assert done.returncode == 0, said[-2000:]
    assert "Overfull" not in said and "undefined" not in said
