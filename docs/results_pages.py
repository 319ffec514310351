"""Writes the pages of results/ from the committed rows: `make results`.

A page is a Jinja template in results/templates. What it quotes it asks for, so that no number of it is typed:

    {% set slack = tests("sfat-audit") %}
    slack adds {{ slack["slack", "pgd20"].points }} points
    {{ slack.table() }}
    {{ accuracies("sfat-audit", "method", "natural, pgd20, autoattack") }}

tests/test_results.py compares every page with what its template makes of the rows.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import stdev
from typing import Any

import jinja2
import pandas
from filelock import FileLock
from tabulate import tabulate

import fatbench
from benchmarks.table import number
from fatbench import api, packed
from fatbench.methods import intervals
from fatbench.report import audit, contrasts, sentences
from fatbench.report.audit import leads, measured, papers, questions
from fatbench.report.audit.read_tables import Known
from fatbench.report.contrasts import Difference
from fatbench.report.numbers import statistics
from fatbench.report.pairs import measured_numbers
from fatbench.report.tables import number_format
from fatbench.report.tables.sheet import Entry
from fatbench.store import jsonl
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import threats, trees, tuning
from fatbench.suite.cells import Plan
from fatbench.suite.declared_contrasts import Contrast
from fatbench.suite.files import Suite

RESULTS = Path(__file__).parent.parent / "results"
TEMPLATES = RESULTS / "templates"
ROWS = {  # the first words of a suite's name -> the file of its rows, and the preset that was run
    "adfl": ("adfl-mnist-jpeg-cpu", "jpeg-cpu"),
    "april-trained-vit-s": ("april-trained-vit-s-jpeg75-cpu", "cpu"),
    "april-trained": ("april-trained-jpeg75-cpu", "cpu"),
    "april-summary": ("april-jpeg75-cpu", "cpu"),
    "april": ("april-jpeg75-cpu", "jpeg75-cpu"),
    "fat-transformers": ("fat-transformers-trained-jpeg75-cpu", "cpu"),
    "fat-baselines": ("fat-baselines-cpu", "cpu"),
    "fat-bounds": ("fat-bounds-fmnist25", "fmnist25"),
    "fat-personal": ("fat-personal-five", "five"),
    "fat-tuned": ("fat-tuned-cpu", "cpu"),
    "fat-variance": ("fat-variance-fmnist25", "fmnist25"),
    "fat-byzantine": ("fat-byzantine-cpu", "cpu"),
    "fat-maps": ("fat-maps-jpeg-cpu", "jpeg-cpu"),
    "fedaux-imagenet": ("fedaux-imagenet-jpeg75-cpu", "cpu"),
    "fedvkd-robust": ("fedvkd-robust-cpu", "cpu"),
    "fedvkd": ("fedvkd-cifar10-jpeg75-p02-cpu", "cpu"),
    "privacy-protocols": ("privacy-protocols-cpu", "cpu"),
    "privacy-line": ("privacy-line-cpu", "cpu"),
    "privacy-members": ("privacy-members-cpu", "cpu"),
    "privacy-imprint": ("privacy-imprint-cpu", "cpu"),
    "privacy-robust": ("privacy-robust-cpu", "cpu"),
    "privacy-updates": ("privacy-updates-cpu", "cpu"),
    "sfat-fashion": ("sfat-fashion-cpu", "cpu"),
    "vit-s-half": ("vit-s-half-jpeg75-cpu", "cpu"),
    "vit-half": ("vit-half-jpeg75-cpu", "cpu"),
    "sfat-": ("sfat-jpeg75-cpu", "jpeg75-cpu"),
}
HEADINGS = {"natural": "natural", "fgsm": "FGSM", "pgd7": "PGD-7", "pgd20": "PGD-20", "cw": "CW",
            "autoattack": "AutoAttack", "prior_worst:pgd20": "PGD-20, worst client",
            "pgd20, exact": "PGD-20; linear: exact",
            **{f"train:member_{score}_tpr": f"`{score}`" for score in ("others", "loss", "adversarial")},
            "own_pgd20": "PGD-20, own images", "own_autoattack": "AutoAttack, own images",
            "worst:own_pgd20": "own, worst client",
            "worst:own_pgd20, if all were equal": "worst, if all were equal"}  # fmt: skip


LABELS = ("name", "row", "metric")  # of a comparison


def rows_of(suite: str, preset: str | None = None) -> tuple[str, str]:
    """(file of the committed rows without its ending, preset) of a suite; a preset may have a file of its own."""
    file, usual_preset = next(rows for begin, rows in ROWS.items() if suite.startswith(begin))
    preset_file = f"{suite}-{preset}"
    return preset_file if preset_file in files_of_rows() else file, preset or usual_preset


@functools.cache
def files_of_rows() -> dict[str, Path]:
    """The committed rows: file without its ending -> file."""
    return {file.name.partition(".")[0]: file for file in packed.results_in(RESULTS)}


class Rows(Mapping[str, Store]):
    """The committed rows, file without its ending -> database; each is imported when it is first asked for.

    folder: of the databases; several processes may share it. Whoever asks closes them.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.opened: dict[str, Store] = {}

    def __getitem__(self, name: str) -> Store:
        if name not in self.opened:
            path = self.folder / f"{name}.db"
            imported = path.with_suffix(".imported")
            with FileLock(path.with_suffix(".lock")):
                self.opened[name] = store = Store.open(str(path), create=True)
                if not imported.exists():
                    jsonl.import_(store, files_of_rows()[name])
                    imported.touch()
        return self.opened[name]

    def __iter__(self) -> Iterator[str]:
        return iter(files_of_rows())

    def __len__(self) -> int:
        return len(list(iter(self)))

    def close(self) -> None:
        for store in self.opened.values():
            store.close()


def shown(value: float, digits: int = 1) -> str:
    """As the tables round."""
    return number_format.rounded(float(value), digits)


class Result:
    """A declared comparison as a page quotes it, in points."""

    def __init__(self, one: Difference, digits: int = 1, family: int = 1):
        assert one.test is not None, f"{one.name}, {one.metric}: {one.why}"
        test, self.seeds, self.n = one.test, len(one.seeds), f"{one.n:,}"
        self.digits, self.test = digits, test
        near, far = sorted(abs(end) for end in (test.low, test.high))  # ends of the interval of the size
        self.mean, self.size, self.low, self.high, self.near, self.far = (
            shown(100 * part, digits) for part in (test.mean, abs(test.mean), test.low, test.high, near, far)
        )
        self.p = sentences.p_text(one.p_corrected or 0.0)
        self.most = "--" if one.at_most is None else sentences.points_up(one.at_most, digits)
        found = test.detectable(contrasts.LEVEL / family)
        self.detectable = "--" if found is None else sentences.points_up(found, digits)
        self.interval = f"{self.mean} ({self.low} to {self.high})"

    def corrected_interval(self, comparisons: int) -> str:
        """The interval after Bonferroni's correction over so many comparisons: "-1.2 to 2.2"."""
        assert isinstance(self.test, statistics.SeedsAndImages)
        half_width = self.test.half(1 - contrasts.LEVEL / comparisons)
        low, high = (
            shown(100 * end, self.digits) for end in (self.test.mean - half_width, self.test.mean + half_width)
        )
        return f"{low} to {high}"


class Family:
    """A suite's declared comparisons by contrast and metric: with `where`, those at these labels of other axes."""

    def __init__(self, comparisons: Sequence[Difference], where: str | None = None, digits: int = 1):
        self.size, self.digits = len(comparisons), digits
        self.comparisons = [one for one in comparisons if where is None or one.row == where]

    def __getitem__(self, key: tuple[str, str]) -> Result:
        (one,) = [one for one in self.comparisons if (one.name, one.metric) == key]
        return Result(one, self.digits)

    def least_detectable(self, metric: str) -> str:
        """The smallest difference that any comparison of a metric finds with power 0.8 after the correction."""
        sizes = [one.detectable for one in self.comparisons if one.metric == metric and one.detectable is not None]
        return sentences.points_up(min(sizes), self.digits)

    def table(self) -> str:
        """A row for each comparison that was tested: points with their interval, the size that the data do not exclude
        (--: no side is above the most frequent class), p after Holm, and the size that is found after that correction.

        If all are of one metric or one contrast, the page names it.
        """
        corrected = f" at 0.05 / {self.size}" * (self.size > 1)
        lines = []
        for one in self.comparisons:
            if one.test is not None:
                result = Result(one, self.digits, self.size)
                metric = HEADINGS.get(one.metric, one.metric)
                lines.append([one.name, one.row, metric, result.interval, result.most, result.p, result.detectable])
        heads = ["difference", "where", "evaluated", "points (95 % interval)", "size at most (95 %)",
                 f"p after Holm over {self.size}", f"found with power 0.8{corrected}"]  # fmt: skip
        alike = [len({getattr(one, name) for one in self.comparisons}) == 1 for name in LABELS]
        kept = [i for i in range(len(heads)) if i >= len(alike) or not alike[i]]
        picked = [[line[i] for i in kept] for line in (heads, *lines)]
        return tabulate(picked[1:], picked[0], tablefmt="github", disable_numparse=True)


class Leak:
    """An attack on privacy as a page quotes it: clients of which any image is named, with Wilson's interval; or, with
    `first`, those whose first image is, with Clopper-Pearson's and the verdict at 5 %.
    """

    def __init__(self, spec: Mapping[str, Any], metrics: Mapping[str, float], first: bool = False):
        algorithm = spec["algorithm"]
        clients = algorithm["rounds"] * algorithm["target_clients"]
        parts = [one["name"] for one in (algorithm["manipulation"], algorithm["inversion"]) if one]
        metric, kind, digits = ("identified_first", "_exact", 1) if first else ("identification", "", 0)
        self.low, high = (shown(100 * metrics[f"{metric}{kind}_{end}"], digits) for end in ("low", "high"))
        hits = round(clients * metrics[metric])
        self.attack, self.threat = f"`{', '.join(dict.fromkeys(parts))}`", threats.of_cell(spec)["threat"]
        self.named, self.interval = f"{hits} of {clients}", f"{self.low} to {high}"
        self.recovered = shown(100 * metrics["recovered"], 0)
        self.chance = f"{100 * metrics[f'{metric}_chance']:.2g}"
        self.verdict = intervals.verdict(hits, clients)


class Pages:
    """What templates may ask of the committed rows. stores: file without its ending -> database."""

    def __init__(self, stores: Mapping[str, Store]):
        self.stores = stores
        loader = jinja2.FileSystemLoader(TEMPLATES)
        self.templates = jinja2.Environment(
            loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True
        )
        self.templates.globals.update(
            tests=self.tests, accuracies=self.accuracies, values=self.values, share=self.share,
            one_seed=self.one_seed, shown=shown,
            leak=self.leak, leaks=self.leaks, verdicts=self.verdicts, kept=self.kept, constants=self.constants,
            exploratory=self.exploratory, pilot=self.pilot, seeds_needed=leads.seeds_needed,
            spread_interval=statistics.spread_interval, share_between=self.share_between, gaps=self.gaps,
            curve=self.curve, audit=audit.of_papers, papers=papers.all_papers, audited=self.audited, below=self.below,
            differences=self.differences, stdev=stdev,
            table=audit.table, overview=audit.overview, shared=audit.shared, seeds_answer=self.seeds_answer,
            bench=json.loads((RESULTS / "bench" / "bench-cpu.json").read_text(encoding="utf-8")), number=number,
            busy=json.loads((RESULTS / "bench" / "busy" / "bench-cpu.json").read_text(encoding="utf-8")),
            byzfl=json.loads((RESULTS / "bench" / "byzfl.json").read_text(encoding="utf-8")),
            own_edge=json.loads((RESULTS / "bench" / "own-edge.json").read_text(encoding="utf-8")),
            wilson=intervals.wilson, columns_apart=self.columns_apart, trials=self.trials,
            yes=self.yes, seeds_apart=self.seeds_apart,
        )  # fmt: skip

    def page(self, name: str) -> str:
        """The text of a page."""
        return self.templates.get_template(f"{name}.md.j2").render()

    def _asked(self, name: str, preset: str | None = None) -> dict[str, str]:
        """Where the rows of a suite are, as arguments of the functions of `fatbench`."""
        file, preset = rows_of(name, preset)
        return {"preset": preset, "db": str(self.stores[file].database.path)}

    def _plan(self, name: str, preset: str | None = None, where: str | None = None) -> tuple[Suite, Plan, Store]:
        file, preset = rows_of(name, preset)
        return *api.plan_read(name, preset, None, where, self.stores[file]), self.stores[file]

    @functools.cache  # noqa: B019  # lives as long as its pages
    def _declared(self, name: str, preset: str | None) -> tuple[Difference, ...]:
        return fatbench.tests(name, **self._asked(name, preset)).parts

    def tests(
        self, name: str, family: str | None = None, where: str | None = None, preset: str | None = None, digits: int = 1
    ) -> Family:
        """A family of comparisons that the suite declares, tested and corrected as a whole; the first by default."""
        declared = self._declared(name, preset)
        family = family or declared[0].family
        return Family([one for one in declared if one.family == family], where, digits)

    def exploratory(self, name: str, sides: list[tuple[str, str]]) -> Family:
        """Differences that a suite does not declare, corrected as one family: ("FAT pgd20", "linear exact") of labels
        with the metric of each.
        """
        suite, plan, store = self._plan(name)
        of = measured_numbers(store, [cell.id for cell in plan.cells], "last").__getitem__
        weighed = {}
        for pair in sides:
            (a, of_a), (b, of_b) = (side.rsplit(" ", 1) for side in pair)
            weighed[f"{a} - {b}"] = Contrast(str(suite.tests[0].axis), {(a, of_a): 1.0, (b, of_b): -1.0})
        tests = suite.tests[0].model_copy(update={"contrasts": weighed})
        return Family(contrasts.family(tests, plan, of))

    def _numbers(self, name: str, metric: str, preset: str | None = None, **how: Any) -> pandas.DataFrame:
        """The stored numbers of a metric, fractions. how: arguments of `fatbench.results`."""
        numbers = fatbench.results(name, stage=None, **how, **self._asked(name, preset))
        return numbers[numbers["metric"] == metric]

    def pilot(self, name: str, preset: str, metric: str) -> dict[str, str]:
        """Method -> accuracy in per cent at seed 0."""
        numbers = self._numbers(name, metric, preset, seeds=[0])
        return {method: shown(100 * value) for method, value in zip(numbers["method"], numbers["value"], strict=True)}

    @functools.cache  # noqa: B019
    def _values(self, name: str, table: str) -> dict[tuple[str, ...], dict[str, Entry]]:
        (grid,) = fatbench.table(name, table, published=False, **self._asked(name)).grids
        headings = [column.heading for column in grid.columns]
        return {
            (*row.key.values(), *group.key.values()): dict(zip(headings, of_group, strict=True))
            for row in grid.rows
            for group, of_group in zip(grid.groups, row.values, strict=True)
        }

    def values(self, name: str, table: str) -> dict[tuple[str, ...], dict[str, float | None]]:
        """The labels of a row and of a group of columns -> heading -> its mean, in a table of the suite; fractions."""
        rows = self._values(name, table)
        return {labels: {heading: value.mean for heading, value in row.items()} for labels, row in rows.items()}

    def columns_apart(self, name: str, table: str, a: str, b: str) -> list[float]:
        """How much the column `a` of a table is above `b`, in points, for each row and group of columns."""
        rows = pandas.DataFrame(self.values(name, table).values())
        assert rows[[a, b]].notna().all(axis=None), f"{name}, {table}: not all is measured"
        return [*(100 * (rows[a] - rows[b]))]

    def trials(self, name: str) -> str:
        """What each row of a tuned suite tried, accuracies of validation images in per cent; bold: what it chose."""
        suite, plan, _ = self._plan(name)
        rows = trees.read(tuning.tuned_file(suite.name, plan.preset, suite.file.parent))[0]["rows"]
        lines = [
            [*row["when"].values(), *(f"**{shown(100 * value)}**" if trial == row["trial"] else shown(100 * value)
                                      for trial, value in row["accuracy"].items())]
            for row in rows
        ]  # fmt: skip
        return tabulate(lines, [*rows[0]["when"], *rows[0]["accuracy"]], tablefmt="github", disable_numparse=True)

    def seeds_apart(self, name: str, metric: str) -> str:
        """How far the largest and the smallest seed of a row are apart, the mean over rows, in points."""
        numbers = self._numbers(name, metric)
        last = numbers.loc[numbers.groupby("cell", sort=False)["round"].idxmax()]
        by_row = last.groupby([*self._plan(name)[1].cells[0].key])["value"]
        return shown(100 * float((by_row.max() - by_row.min()).mean()))

    def share(self, name: str, table: str, row: str, heading: str) -> str:
        """A share of the way between two rows, in per cent, with its 95 % interval: "64 % (53 to 75)"."""
        value = self._values(name, table)[row,][heading]
        assert value.mean is not None and value.interval is not None, f"{row}, {heading}: not measured"
        mean, low, high = (shown(100 * part, 0) for part in (value.mean, *value.interval))
        return f"{mean} % ({low} to {high})"

    def one_seed(self, name: str, sides: list[tuple[str, str]], metric: str) -> list[dict[str, str]]:
        """A network against another, for each pair of filters: points with the interval over images, p after Holm."""
        asked = self._asked(name)
        tests = [fatbench.compare(a, b, suite=name, metric=metric, **asked).parts[0].images[0] for a, b in sides]
        lines = []
        for test, p in zip(tests, statistics.holm([test.p for test in tests]), strict=True):
            mean = (test.only_a - test.only_b) / test.n
            half = 1.96 * (((test.only_a + test.only_b) / test.n - mean**2) / (test.n - 1)) ** 0.5
            low, high = shown(100 * (mean - half)), shown(100 * (mean + half))
            lines.append({"points": f"{shown(100 * mean)} ({low} to {high})", "p": sentences.p_text(p)})
        return lines

    def accuracies(
        self, name: str, rows: str, columns: str, where: str | None = None, preset: str | None = None,
        digits: int = 1, images: str = "all", more: Iterable[list[str]] = (),
    ) -> str:  # fmt: skip
        """A table in per cent, mean and sample standard deviation over seeds. rows: axes; columns: metrics.

        If all rows have the same number of seeds, the page names it. Rows that have not run are left out.

        images: "all" of each attack, or those that they have in "common". more: rows below them.
        """
        (grid,) = fatbench.table(
            name, rows=rows.split(", "), columns=columns.split(", "), where=where, published=False, digits=digits,
            images=images, **self._asked(name, preset),
        ).grids  # fmt: skip
        rows_run = [row for row in grid.rows if any(value.seeds for value in row.values[0])]
        seeds = [max(len(value.seeds) for value in row.values[0]) for row in rows_run]
        several = len(set(seeds)) > 1
        headings = (HEADINGS.get(one.heading, one.heading) for one in grid.columns)
        lines = []
        for row, count in zip(rows_run, seeds, strict=True):
            cells = [f"{value.number} {value.spread}".rstrip() for value in row.values[0]]
            lines.append([*(row.key.get(axis, "") for axis in grid.axes), *([str(count)] if several else []), *cells])
        heads = [*grid.axes, *(["seeds"] if several else []), *headings]
        return tabulate([*lines, *more], heads, tablefmt="github", disable_numparse=True)

    def kept(self, name: str, where: str, preset: str | None = None) -> str:
        """In how many per cent of the rounds a robust aggregator keeps a malicious client, over them and the seeds."""
        numbers = self._numbers(name, "weight", preset, where=where, clients=True)
        _, plan, _ = self._plan(name, preset, where)
        malicious = {cell.id: cell.spec["malicious"]["clients"] for cell in plan.cells}  # the first clients
        weights = numbers["value"][numbers["client"].between(0, numbers["cell"].map(malicious) - 1)]
        return shown(100 * float((weights > 0).mean()), 0)

    def constants(self, name: str, where: str, own: str) -> list[str]:
        """What a constant reaches, mean and deviation over the seeds: the most frequent class on all test images; each
        client's on its own, in the mean and for the worst client. where: one method. own: the evaluation of own images.
        """
        numbers = self._numbers(name, "chance", where=where, clients=True)
        evaluated = numbers["stage"].map(lambda stage: parsed(stage).metric)
        of_all = numbers[evaluated == "natural"].set_index("seed")["value"]
        of_clients = numbers[(evaluated == own) & (numbers["client"] >= 0)].groupby("seed")["value"]
        seeds = (of_all, of_clients.mean(), of_clients.min())
        return [f"{shown(100 * of_seed.mean())} ±{shown(100 * of_seed.std())}" for of_seed in seeds]

    def differences(self, name: str, method: str, baseline: str, metric: str) -> list[float]:
        """The difference between two labels of a suite's axis `method` at each seed, in points."""
        numbers = self._numbers(name, metric, where=f"method in ['{method}', '{baseline}']")
        accuracies = numbers.pivot(index="seed", columns="method", values="value")
        return [*(100 * (accuracies[method] - accuracies[baseline])).dropna()]

    def gaps(self, name: str, method: str, other: str, rounds: list[int]) -> list[str]:
        """By how many points the monitored accuracy of a method is above that of another after these rounds."""
        numbers = self._numbers(name, "monitor", where=f"method in ['{method}', '{other}']")
        means = numbers.groupby(["method", "round"])["value"].mean()
        return [shown(float(100 * (means[method, round] - means[other, round]))) for round in rounds]

    def curve(self, name: str, where: str) -> list[str]:
        """The monitored accuracy of one cell after each monitored round, in per cent."""
        numbers = self._numbers(name, "monitor", where=where).sort_values("round")
        return [shown(100 * value) for value in numbers["value"]]

    def yes(self, name: str, metric: str, where: str) -> str:
        """In how many cells a yes or no that training logs is yes after the last round: "9 of 9"."""
        answers = self._numbers(name, metric, where=where).sort_values("round").groupby("cell")["value"].last()
        return f"{int(answers.sum())} of {len(answers)}"

    def share_between(self, name: str, where: str, axis: str, metric: str) -> dict[str, str]:
        """Which part of an accuracy's variance over runs lies between the labels of an axis, with its 95 % interval, in
        per cent; and the standard deviations between and within labels, in points.
        """
        numbers = self._numbers(name, metric, where=where)
        groups = [100 * group for _, group in numbers[numbers["stage"] != "train"].groupby(axis)["value"]]
        estimate, interval = statistics.share_between([group.tolist() for group in groups])
        within = float(sum(group.var() for group in groups)) / len(groups)
        mean, low, high = (shown(100 * part, 0) for part in (estimate, *interval))
        between = within * estimate / (1 - estimate)
        return {"share": f"{mean} % ({low} to {high})", "within": shown(within**0.5), "between": shown(between**0.5)}

    @staticmethod
    def seeds_answer(paper: str, points: float) -> str:
        """What is said of the seeds that a paper's leads need at a spread in points."""
        return leads.deviations(papers.numbers(paper), points).says.rpartition("; ")[2]

    @staticmethod
    def below(paper: str, table: str) -> str:
        """How many of a printed table's robust accuracies are below a constant classifier's: "57 of 72"."""
        numbers = papers.numbers(paper)
        answer = questions.floor(numbers[numbers["table"] == table])
        return f"{answer.raised} of {answer.asked}"

    def audited(self, *suites: tuple[str, str | None]) -> pandas.DataFrame:
        """The measured cells of (suite, preset; None: its usual one), each once, and the papers, as one long table."""
        longs = []
        for name, preset in suites:
            planned = {one.id for cell in self._plan(name, preset)[1].cells for one in cell.evaluations}
            numbers = fatbench.results(name, **self._asked(name, preset)).assign(suite=name)
            of_suite = [parsed(stage).evaluation in planned for stage in numbers["stage"]]
            longs.append(measured.of_results(numbers[of_suite], Known(paper="*our own*")).numbers)
        return pandas.concat([*longs, papers.numbers()], ignore_index=True)

    def leak(self, name: str, where: str, first: bool = False) -> Leak:
        """What an attack makes of what is sent, from the filter of one cell."""
        (cell,) = self._plan(name, None, where)[1].cells
        numbers = fatbench.results(name, stage=None, where=where, **self._asked(name))
        return Leak(cell.spec, dict(zip(numbers["metric"], numbers["value"], strict=True)), first)

    def leaks(self, rows: Iterable[tuple[str, str, str]]) -> str:
        """A table of attacks. rows: (what is sent, suite, filter of one cell); of a batch the best pair counts."""
        lines = []
        for sent, name, where in rows:
            leak = self.leak(name, where)
            named = f"{leak.named} ({leak.interval})"
            lines.append([sent, leak.attack, leak.threat, named, leak.chance, leak.recovered])
        heads = ["what is sent", "attack", "threat", "identified (95 %, in %)", "chance, %", "recovered, %"]
        return tabulate(lines, heads, tablefmt="github", disable_numparse=True)

    def verdicts(self, name: str, where: str) -> str:
        """A table of the measured attacks: clients whose first image is named, and the verdict."""
        numbers = fatbench.results(name, stage=None, where=where, **self._asked(name))
        by_cell = numbers.pivot_table(index="cell", columns="metric", values="value", aggfunc="last")
        cells = [cell for cell in self._plan(name, None, where)[1].cells if cell.id in by_cell.index]
        axes = [axis for axis in cells[0].key if len({cell.key[axis] for cell in cells}) > 1]
        lines = []
        for cell in cells:
            leak = Leak(cell.spec, by_cell.loc[cell.id], first=True)
            labels, named = [cell.key[axis] for axis in axes], f"{leak.named} ({leak.interval})"
            lines.append([*labels, leak.threat, named, leak.chance, leak.verdict])
        heads = [*axes, "threat", "named (95 %, in %)", "chance, %", "verdict"]
        return tabulate(lines, heads, tablefmt="github", disable_numparse=True)


def main() -> None:
    """Write every page that has a template."""
    with tempfile.TemporaryDirectory() as folder, closing(Rows(Path(folder))) as rows:
        pages = Pages(rows)
        for template in sorted(TEMPLATES.glob("*.md.j2")):
            page = template.name.removesuffix(".md.j2")
            (RESULTS / f"{page}.md").write_text(pages.page(page), encoding="utf-8")


if __name__ == "__main__":
    main()
