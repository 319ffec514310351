"""Sanity checks of printed tables: reading, every question by other code, planted faults, honest tables."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pandas
import pytest
from statsmodels.stats.power import TTestPower

import fatbench
from fatbench.errors import SpecError
from fatbench.report import audit
from fatbench.report.audit import QUESTIONS, leads
from fatbench.report.audit.grids import grids
from fatbench.report.audit.papers import all_papers, load
from fatbench.report.audit.questions import _fits
from fatbench.report.audit.read_tables import LONG, Known, read

PUBLISHED = Path(__file__).parent.parent / "suites" / "published"
PRINTED = Path(__file__).parent / "printed"
ASK = {question.name: question.ask for question in QUESTIONS}
Run = Callable[..., tuple[int, str, str]]
SHAPES = sorted(file.name for file in PRINTED.iterdir() if not file.name.endswith(".long.csv"))


def lines(name: str) -> list[dict[str, str]]:
    with (PUBLISHED / name).open() as file:
        return list(csv.DictReader(file))


def numbers_of(name: str) -> pandas.DataFrame:
    return next(paper.numbers for paper in all_papers() if paper.name == name)


def long(text: str, **known: Any) -> pandas.DataFrame:
    """The long table of a text whose columns are separated by spaces."""
    (grid,) = grids("\n".join(",".join(line.split()) for line in text.strip().splitlines()), "t")
    return read(grid, "t", Known(**known)).numbers


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHAPES)
def test_a_table_becomes_the_long_table_beside_it(name: str) -> None:
    (grid,) = grids((PRINTED / name).read_text(), name)
    wanted = pandas.read_csv(PRINTED / f"{Path(name).stem}.long.csv", dtype=str, keep_default_na=False)
    found = read(grid, "paper", Known()).numbers[[*wanted]]

    def comparable(table: pandas.DataFrame) -> list[list[str]]:
        numeric = {*wanted} & {"steps", "value", "decimals", "deviation", "runs", "n", "classes"}
        values = {name: pandas.to_numeric(table[name]).map(lambda v: f"{v:g}") for name in numeric}
        return table.assign(**values).astype(str).values.tolist()

    assert comparable(found) == comparable(wanted)


def test_what_is_not_understood_is_named() -> None:
    (grid,) = grids((PRINTED / "german.csv").read_text(), "german.csv")
    assert read(grid, "german", Known()).unread == ["columns Laufzeit (h)", "row 2, Clean: '1.058.13'"]
    (grid,) = grids("Method,Clean,PGD\nA,80,130\nB,70,30\n", "t.csv")
    assert read(grid, "t", Known()).unread == ["row 1, PGD: no accuracy is 130"]


def test_a_frame_is_read_like_its_csv() -> None:
    frame = pandas.DataFrame({"Method": ["FAT", "SFAT"], "PGD-20": [32.56, 37.14], "AA": [29.17, math.nan]})
    found = fatbench.audit(frame, images=10000, baseline="FAT")
    assert [*found.numbers] == list(LONG)
    assert found.numbers[["method", "attack", "value", "role"]].values.tolist() == [
        ["FAT", "pgd", 32.56, "baseline"], ["FAT", "autoattack", 29.17, "baseline"], ["SFAT", "pgd", 37.14, "proposed"],
    ]  # fmt: skip
    grouped = frame.set_index("Method").set_axis(pandas.MultiIndex.from_product([["SVHN"], ["PGD-20", "AA"]]), axis=1)
    assert {*fatbench.audit(grouped).numbers["dataset"]} == {"SVHN"} and "SVHN" not in {*found.numbers["dataset"]}


def test_results_are_read_with_their_labels() -> None:
    frame = pandas.DataFrame({
        "cell": ["a", "a", "b", "c"], "method": ["FAT", "FAT", "FAT", "SFAT"], "seed": [0, 0, 1, 0],
        "round": [1, 2, 2, 2],
        "dataset": "CIFAR-10", "metric": "pgd20", "attack": "pgd(eps=8/255, steps=20)", "client": -1, "outcomes": 500,
        "n": 500, "suite": "s", "value": [0.1, 0.5, 0.4, 0.3], "doubts": "",
    })  # fmt: skip
    numbers = fatbench.audit(frame).numbers
    assert numbers[["method", "attack", "steps", "radius", "value", "runs", "n", "classes"]].values.tolist() == [
        ["FAT", "pgd", 20, "8/255", 45, 2, 500, 10], ["SFAT", "pgd", 20, "8/255", 30, 1, 500, 10],
    ]  # fmt: skip
    assert numbers["deviation"][0] == pytest.approx(5 * math.sqrt(2)) and math.isnan(numbers["deviation"][1])


# --- every count of the shipped tables, by other code -------------------------------------------------------------

ATTACKS = ("fgsm", "pgd5", "pgd10", "pgd20", "pgd40", "pgd100", "pgd", "cw", "aa")


def stronger(row: dict[str, str]) -> list[tuple[str, str]]:
    """(weaker, stronger) columns with numbers in a row."""
    has = [attack for attack in ATTACKS if row.get(attack)]
    pgd = [attack for attack in has if attack.startswith("pgd")]
    pairs = [("natural", attack) for attack in has if row["natural"]]
    pairs += [("fgsm", attack) for attack in [*pgd, *({"aa"} & {*has})] if "fgsm" in has]
    return pairs + [(attack, "aa") for attack in has if "aa" in has and attack not in ("fgsm", "aa")]


def test_the_floor_counts_what_the_files_print() -> None:
    for table, count in (("1", 6), ("2", 14), ("3", 57)):
        rows = lines(f"fat-transformers-t{table}.csv")
        below = sum(float(row["at_robust_acc"]) < 10 for row in rows)
        of_table = numbers_of("FAT with transformers").query("table == @table")
        assert (ASK["floor"](of_table).raised, ASK["floor"](of_table).asked) == (below, len(rows)) == (count, len(rows))
    classes = {"CIFAR-10": 10, "CIFAR-100": 100, "MNIST": 10, "Criteo": 2, "Credit card fraud": 2, "Tiny-ImageNet": 200}
    for name, file, count in (("DecVFAL", "decvfal.csv", 8), ("CE-VFAL", "ce-vfal.csv", 29)):
        trained = [row for row in lines(file) if row["role"] != "undefended"]
        below = sum(
            float(row[attack]) < 100 / classes.get(row["dataset"].split(" (")[0], 1e9)
            for row in trained for attack in ATTACKS if row.get(attack)
        )  # fmt: skip
        assert ASK["floor"](numbers_of(name)).raised == below == count
    of_celeba = [float(row[attack]) for row in lines("sfat-t19.csv") for attack in ("fgsm", "pgd20", "cw")]
    assert ASK["floor"](numbers_of("SFAT")).raised == sum(value < 50 for value in of_celeba)


def test_the_order_counts_what_the_files_print() -> None:
    answer, rows = ASK["order"](numbers_of("CE-VFAL")), lines("ce-vfal.csv")
    more = [(row, pair) for row in rows for pair in stronger(row) if float(row[pair[1]]) > float(row[pair[0]])]
    assert answer.asked == sum(len(stronger(row)) for row in rows) == 290
    assert f"({len(more)} at all; 110 pairs without printed radii)" in answer.says and len(more) == 105
    unequal = {("cw", attack) for attack in ATTACKS} | {(attack, "cw") for attack in ATTACKS}
    asked = [
        pair for row in lines("decvfal.csv") for pair in stronger(row)
        if pair[0] == "natural" or (pair not in unequal and row["table"] not in ("7", "8", "14"))
    ]  # fmt: skip
    of_tables = ASK["order"](numbers_of("DecVFAL"))
    assert of_tables.asked == len(asked) == 242 and "(12 at all; 10 pairs without printed radii)" in of_tables.says


def test_beyond_sampling_is_beyond_the_corrected_quantile() -> None:
    """Table 10 of CE-VFAL: no size is known, so 1,000 images; 45 pairs without natural ones."""
    rows = [row for row in lines("ce-vfal.csv") if row["table"] == "10"]
    pairs = [[float(row[name]) / 100 for name in pair] for row in rows for pair in stronger(row)]
    limit = NormalDist().inv_cdf(1 - 0.05 / len(pairs))
    beyond = sum(q - p > limit * math.sqrt((p * (1 - p) + q * (1 - q)) / 1000) for p, q in pairs)
    answer = ASK["order"](numbers_of("CE-VFAL").query("table == '10'"))
    assert (answer.raised, answer.asked) == (beyond, len(pairs)) == (23, 45)
    bounds = answer.rows.set_index(["row", "radius"])["at most"]
    assert bounds["Criteo, clients=2, VFL PGD-40", "0.8"].unique().tolist() == [28.47]


def test_the_grain_is_found_by_fractions() -> None:
    of_nine = [row for row in lines("decvfal.csv") if row["table"] == "9"]
    values = [row[name] for row in of_nine for name in [*ATTACKS, *OTHER] if row.get(name)]
    rows = ASK["grain"](numbers_of("DecVFAL")).rows.set_index("data")

    def fits(text: str, n: int) -> bool:
        value, digits = Fraction(text), len(text.partition(".")[2])
        lowest = math.ceil((value - Fraction(1, 2 * 10**digits)) * n / 100)
        return Fraction(100 * lowest, n) < value + Fraction(1, 10**digits)

    assert sum(fits(text, 10000) for text in {*values}) == rows.loc["MNIST", "fit it"]
    assert all(fits(text, 9984) for text in values) and rows.loc["MNIST", "smallest n of all"] == 9984
    assert not any(all(fits(text, n) for text in values) for n in range(9900, 9984))
    assert rows.loc["Credit card fraud", "smallest n of all"] == 384
    assert rows.loc["COVID-19 images", "result"] == "inferred"
    assert _fits(np.array([[33.33, 2], [33.34, 2], [33.32, 2]]), np.array([3])).tolist() == [[True], [False], [False]]


OTHER = ("cer", "zo_fgsm", "zo_pgd", "all", "ets")


def test_equal_columns_of_two_papers_are_found() -> None:
    rows = audit.shared().rows
    of = {(row["table"], row["method"]): row for row in lines("decvfal.csv")}
    other = {(row["table"], row["method"]): row for row in lines("ce-vfal.csv")}
    for table, column, other_table, other_column in (
        ("2", "fgsm", "4", "fgsm"), ("4", "zo_pgd", "6", "pgd"), ("4", "ets", "6", "ets"),
    ):  # fmt: skip
        ours = {row[column] for key, row in of.items() if key[0] == table}
        same = ours & {row[other_column] for key, row in other.items() if key[0] == other_table}
        of_ce_vfal = rows[rows["column"].str.startswith(f"CE-VFAL {other_table}: {other_column}")]
        both = of_ce_vfal["and"].str.startswith(f"DecVFAL {table}: {column.replace('_', '-')}")
        (line,) = of_ce_vfal[both].itertuples()
        assert line.equal == len(same) >= 4
    assert len(rows) == 3


def test_leads_are_those_of_the_files() -> None:
    means = {(row["dataset"], row["optimizer"], row["method"]): row for row in lines("sfat-t3.csv")}
    ahead, within = 0, 0
    for (dataset, optimizer, method), row in means.items():
        if method != "SFAT":
            continue
        n = 26032 if dataset == "SVHN" else 10000
        for attack in ("fgsm", "pgd20", "cw", "aa"):
            p, q = (float(one[attack]) / 100 for one in (row, means[dataset, optimizer, "FAT"]))
            ahead += p > q
            within += 0 < p - q <= 1.96 * math.sqrt((p * (1 - p) + q * (1 - q)) / n)
    answer = ASK["lead"](numbers_of("SFAT").query("table == '3'"))
    assert (answer.asked, answer.raised) == (ahead, within)


def test_a_printed_deviation_is_that_of_two_runs() -> None:
    means, single = lines("sfat-t3.csv"), {tuple(row[k] for k in row)[:3]: row for row in lines("sfat-t21.csv")}
    equal = 0
    for row in means:
        other = single[tuple(row[k] for k in row)[:3]]
        for metric in ("natural", "fgsm", "pgd20", "cw", "aa"):
            apart = abs(float(other[f"niid_{metric}"]) - float(row[metric]))
            equal += abs(apart - float(row[f"{metric}_std"])) < 0.0101
    assert f"; {equal} of 90 deviations equal |single run - mean|" in ASK["deviations"](numbers_of("SFAT")).says
    assert equal == 86


def test_the_power_behind_the_seeds_is_that_of_statsmodels() -> None:
    for effect in (0.3, 0.5, 0.8, 1.5, 2.0, 4.0):
        n = leads.seeds_needed(effect, 1.0)
        assert n is not None and TTestPower().power(effect, n - 1, 0.05) < 0.8 <= TTestPower().power(effect, n, 0.05)
    assert (leads.seeds_needed(1.0, 2.0), leads.seeds_needed(1.0, 1.0)) == (34, 10)  # Cohen's tables
    assert leads.seeds_needed(54.0, 1.0) == 2
    assert leads.seeds_needed(-1.0, 1.0) is leads.seeds_needed(1.0, math.nan) is leads.seeds_needed(1.0, 0.0) is None
    assert leads.seeds_needed(0.001, 1.0) == leads.MOST_SEEDS


# --- planted faults, and honest tables ----------------------------------------------------------------------------

PLANTED = [  # question, table, what is known besides, how often it is raised
    ("floor", "method pgd20\nA 9.9\nB 31.0", {"dataset": "CIFAR-10"}, 1),
    ("order", "method fgsm pgd20 aa\nA 40.1 35.0 31.0\nB 28.5 73.9 20.0", {"images": 10000, "radius": "8/255"}, 1),
    ("order", "method natural pgd10 pgd100\nA 80.1 35.0 39.0", {"images": 10000}, 1),
    ("grain", "method clean pgd20\nA 85.12 40.33\nB 84.77 41.96", {"images": 100}, 1),
    ("equal", "method fgsm pgd20\nA 53.32 53.32\nB 59.08 59.08\nC 63.63 63.63\nD 52.09 52.09\nE 6.2 6.9", {}, 1),
    ("radius", "method eps aa\nA 2/255 61.32\nA 4/255 61.32\nA 8/255 61.32\nB 2/255 50.2\nB 4/255 40.1", {}, 1),
    ("radius", "method eps pgd20\nA 2/255 40.0\nA 8/255 55.0", {"images": 10000}, 1),
    ("undefended", "method pgd20\nnone 55.4\nA 60.2", {"dataset": "CIFAR-10"}, 1),
    ("lead", "method pgd20\nA 60.10\nours 60.30", {"dataset": "CIFAR-10"}, 1),
    ("ranking", "method pgd20 aa\nA 60.1 20.3\nB 50.1 45.3", {"dataset": "CIFAR-10"}, 1),
    ("autoattack", "method clean pgd20\nA 80.1 40.2", {}, 1),
    ("deviations", "method pgd20 pgd20_std\nA 40.1 0.3\nB 41.0 0.2\nC 39.0 -", {}, 1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "known", "count"), PLANTED)
def test_a_planted_fault_is_asked_about(name: str, text: str, known: dict[str, Any], count: int) -> None:
    answer = ASK[name](long(text, **known))
    assert answer.raised == count, answer.says


@pytest.fixture(scope="module")
def honest() -> pandas.DataFrame:
    """Four hundred tables at the edge: independent outcomes, attacks and radii equally strong, 500 or 10,000 images."""
    rng = np.random.default_rng(20261128)
    columns = [("natural", math.nan, "unprinted")]
    columns += [(attack, steps, eps) for eps in ("4/255", "8/255") for attack, steps in
                (("fgsm", math.nan), ("pgd", 20), ("autoattack", math.nan))]  # fmt: skip
    rows = []
    for table in range(400):
        n = 500 if table % 2 else 10000
        methods = zip("abcd", ("baseline", "baseline", "proposed", "undefended"), (0.3, 0.34, 0.38, 0.2), strict=True)
        for method, role, p in methods:
            for attack, steps, eps in columns:
                value = round(100 * rng.binomial(n, 0.8 if attack == "natural" else p) / n, 2)
                labels = ("p", str(table), "CIFAR-10", "", method, role, attack, steps, eps)
                rows.append((*labels, value, 2, math.nan, math.nan, n, 10, attack, method))
    return pandas.DataFrame(rows, columns=LONG)


RARELY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("order", "radius", "undefended", "ranking")]


@pytest.mark.parametrize("name", ["floor", "grain", *RARELY])
def test_at_most_one_in_twenty_honest_tables_is_asked_about(name: str, honest: pandas.DataFrame) -> None:
    answer = ASK[name](honest)
    tables = answer.rows["table"].nunique() if len(answer.rows) else 0
    assert answer.asked >= 400 and tables <= 20


def test_equal_numbers_by_chance_are_not_asked_about(honest: pandas.DataFrame) -> None:
    """Fifty tables together, as of fifty papers, and each alone."""
    some = honest[honest["table"].astype(int) < 200]
    raised = [ASK["equal"](table).raised > 0 for _, table in some.groupby("table")]
    together = ASK["equal"](some[some["table"].astype(int) < 12])
    assert sum(raised) <= 10 and together.raised <= 1


def test_a_lead_that_the_images_bear_is_not_asked_about(honest: pandas.DataFrame) -> None:
    large = honest[(honest["n"] == 10000) & honest["method"].isin(["a", "c"])]
    answer = ASK["lead"](large)
    assert answer.raised <= answer.asked / 20
    by_image = large.assign(value=50.0 + 0.05 * (large["method"] == "c"))
    assert (answer := ASK["lead"](by_image)).raised == answer.asked


# --- papers, and the command --------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_contributed_table_is_understood_as_a_whole(file: Path) -> None:
    paper = load(file)
    assert paper.read and paper.title and not paper.unread and len(paper.numbers) > 5
    assert {*paper.answers} <= {*ASK}
    assert paper.numbers["value"].between(0, 100).all()
    words = audit.of_papers(name=paper.name).text("markdown").lower()
    assert not {"wrong", "error in", "fake", "fraudulent"} & {*words.split()}


@pytest.mark.parametrize(("text", "message"), [
    ("paper: x\ntables: [{file: t.csv, radios: 8/255}]", "unknown key 'radios'.*radius"),
    ("paper: x\nread: y", "expected the keys paper, read and tables"),
    ("paper: x\ntables: [{file: none.csv}]", "none.csv: No such file"),
])  # fmt: skip
def test_a_contribution_with_a_mistake_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(text)
    (tmp_path / "t.csv").write_text("method,pgd20\nA,30.1\n")
    with pytest.raises(SpecError, match=message):
        load(tmp_path / "x.yaml")


def test_the_command_prints_what_was_understood_and_asked(tmp_path: Path, run: Run) -> None:
    file = tmp_path / "paper.csv"
    file.write_text("Method,Clean,FGSM,PGD-20,Time\nFedAvg,80.1,9.5,40.2,3 h\nSFAT,81.2,50.1,45.3,4 h\n")
    known = "--classes 10 --images 10000 --radius 8/255 --baseline FedAvg"
    code, out, err = run("audit", str(file), *known.split())
    assert (code, err) == (0, "")
    understood = (
        "6 accuracies of 2 methods under natural, fgsm, pgd-20; test images 10,000; radius 8/255; proposed SFAT"
    )
    assert f"paper: {understood}" in out
    assert "1 of 4 robust accuracies are below it" in out and "at most" in out
    code, out, _ = run("audit", str(file), "--format", "json")
    record = json.loads(out)
    assert not code and [check["name"] for check in record["checks"]] == [*ASK] and record["understood"]
    code, out, _ = run("audit", str(file), "--format", "csv")
    assert out.splitlines()[0] == ",".join(LONG) and len(out.splitlines()) == 7


@pytest.mark.parametrize(("content", "options", "message"), [
    ("a,b\nx,y\n", (), "no column is understood as an accuracy (the columns: a, b)"),
    ("", (), "no table found"),
    ("only words here\nand here\n", (), "no table found"),
    ("Method,PGD\nA,30\n", ("--baseline", "B"), "--baseline: no method is called 'B'"),
    ("Method,PGD\nA,30\n", ("--method", "Metod"), "has no column 'Metod'"),
    ("Method,PGD\nA,30\n", ("--classes", "1"), "--classes: expected a whole number of at least 2, got 1"),
    ("Method,PGD\nA,30\n", ("--images", "0"), "--images: expected a whole number of at least 1, got 0"),
    ("Method,PGD\nA,30\n", ("--radius", "big"), "--radius: expected a number such as 8/255 or 0.03, got 'big'"),
    ("Method,PGD\nA,30\n", ("--spread", "-1"), "--spread: expected a positive number of points, got -1"),
    ("Method,PGD\nA,30,4,5\nB,1\n", (), "paper.csv"),
    ("Method,PGD\nA,300\n", (), "no accuracy is printed"),
])  # fmt: skip
def test_a_mistake_is_one_message(
    content: str, options: tuple[str, ...], message: str, tmp_path: Path, run: Run
) -> None:
    (tmp_path / "paper.csv").write_text(content)
    code, out, err = run("audit", str(tmp_path / "paper.csv"), *options)
    assert code == 2 and not out and message in err.replace("\n", " ") and "Traceback" not in err


def test_without_a_file_all_papers_are_asked(run: Run) -> None:
    code, out, _ = run("audit", "--format", "json", "--spread", "2.6")
    checks = {check["name"]: check for check in json.loads(out)["checks"]}
    counts = [ASK["floor"](paper.numbers).raised for paper in all_papers()]
    assert not code and checks["floor"]["raised"] == sum(counts)
    assert {row["sd"] for row in checks["deviations"]["rows"]} == {2.6}
