"""`report --differences`: every method with its difference from the baseline, as in the README's table."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fatbench.cli.app import app
from fatbench.store.stages import Store

ROOT = Path(__file__).parent.parent
COMMAND = ["report", "fat-baselines", "--preset", "cpu", "--differences", "--metric", "autoattack", "--common"]


@pytest.fixture(scope="module")
def db(committed: Mapping[str, Store]) -> str:
    return str(committed["fat-baselines-cpu"].database.path)


def printed(db: str, *options: str) -> str:
    return CliRunner().invoke(app, [*COMMAND, *options, "--db", db], catch_exceptions=False).output


def cells(line: str) -> list[str]:
    return [part.strip() for part in line.strip().strip("|").split("|")]


def test_a_method_of_one_seed_is_no_part_of_the_family(db: str) -> None:
    *_, untested = [cells(line) for line in printed(db).splitlines() if line.startswith("|")]
    assert untested[0] == "FedRBN" and untested[-2:] == ["--", "--"]


def test_a_page_s_differences_are_what_the_command_prints(committed: Mapping[str, Store]) -> None:
    """p too, which is after Holm over the comparisons that the suite declares."""
    command = ["report", "fat-bounds", "--preset", "fmnist25", "-c", "report.digits=1"]
    choice = ["-k", "method in [pooled, FAT, SFAT, CalFAT, MixFAT, FedTRADES]", "--metric", "natural,pgd20,autoattack"]
    db = str(committed["fat-bounds-fmnist25"].database.path)
    shown = CliRunner().invoke(app, [*command, *choice, "--differences", "--metric", "autoattack", "--db", db]).output
    _, _, *rows = [cells(line) for line in shown.splitlines() if line.startswith("|")]
    page = [cells(line) for line in (ROOT / "results" / "bounds.md").read_text().splitlines() if line.startswith("| ")]
    on_page = {row[0]: row[2:5] for row in page if row[1] == "AutoAttack"}
    compared = [row for row in rows if row[0] != "FAT"]
    assert len(rows) == 6 and {f"{row[0]} - FAT": row[4:7] for row in compared} == on_page


def test_every_format_says_the_same(db: str) -> None:
    """What is not measured has no row; a method with one seed is not tested, and its doubt is said."""
    rows = list(csv.DictReader(io.StringIO(printed(db, "--format", "csv"))))
    data = json.loads(printed(db, "--format", "json"))
    assert [row["method"] for row in rows] == [row["method"] for row in data["rows"]] and len(rows) == 10
    of = {row["method"]: row for row in data["rows"]}
    assert of["FAT"]["difference"] is None and of["SFAT"]["difference"] == pytest.approx(0.0118)
    # the larger end of the interval
    assert of["SFAT"]["at_most"] == of["SFAT"]["high"] == pytest.approx(float(rows[1]["high"]), rel=1e-14)
    assert (of["FedRBN"]["p"], of["FedRBN"]["at_most"]) == (None, None) and "frequent class" in of["FedRBN"]["doubts"]
    interval = {"latex": r"{\scriptsize ($-$2.1 to 4.5)}", "html": '<span class="std">(-2.1 to 4.5)</span>'}
    for format in ("markdown", "terminal", "latex", "html"):
        text = printed(db, "--format", format, "-c", "report.digits=1")
        assert interval.get(format, "1.2 (-2.1 to 4.5)") in text and "not above the most frequent class" in text
        # of the families that the suite declares
        assert "p after Holm over 6 and 10" in text.replace(r"\\", " ")
        assert (r"\textdagger" if format == "latex" else "†") in text
        title = " ".join(text.partition("66.8")[0].split())  # above the first number: the suite, and that it is reduced
        assert "Methods of federated adversarial training on skewed clients" in title and "CPU PRESET - not" in title


def test_it_fits_a_terminal_and_names_what_is_not_measured(db: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns that the baseline lacks need be asked for; methods without a number are named."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = printed(db, "--format", "terminal").splitlines()
    assert max(map(len, lines)) <= 80 and "PGD-20" in "".join(lines) and "[1/5]" in "".join(lines)
    assert "not measured: MixFAT, replace" in " ".join(lines)
    wide = printed(db, "--format", "markdown")
    assert "attacked" not in wide and "SCAFFOLD" in wide.partition("not measured")[2]
    assert "attacked" in printed(db, "--metric", "autoattack,pgd20_attacked").partition("|:-")[0]


def test_latex_is_a_float_with_the_command_that_made_it(db: str) -> None:
    text = printed(db, "--format", "latex")
    assert "fat-baselines --preset cpu --differences --metric autoattack --format latex" in text
    assert r"\caption{" in text and r"\end{table}" in text and "MixFAT, weighted" in text
