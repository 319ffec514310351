"""Sources of a suite file, and the measurements that they select."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes
from fatbench.report.numbers.statistics import ImageOutcomes, wilson
from fatbench.settings import PRECISIONS
from fatbench.store.inputs import Inputs
from fatbench.store.selection import Checkpoint
from fatbench.store.stage_names import parsed
from fatbench.suite import facts
from fatbench.suite.tables import OVER, SOURCE

if TYPE_CHECKING:
    from fatbench.report.numbers.number import Number
    from fatbench.report.numbers.provenance import Origin
    from fatbench.report.numbers.statistics import Groups
    from fatbench.suite.cells import Cell, Evaluation

ENDS = ("low", "high")  # of an interval, as a metric's name ends: "identification_low"
PRIOR_STAGE = "prior"
PRIOR = "prior_accuracy"  # per client, in the stage of an evaluation
EVERY = -2  # the client of a source "metric[*]": a line each
RANGE = -3  # of "metric[range]": the largest of all clients less the smallest
INDICES = {None: -1, "*": EVERY, "range": RANGE}


@dataclass(frozen=True)
class Source:
    """The parsed form of a source: "pgd20", "train:drift_post@10", "gap:pgd20" or "train:weight[*]"."""

    text: str
    stage: str  # "evaluation", "train", "gap", "artifact", "prior..." of the clients' own accuracies, or one of OVER
    metric: str
    client: int  # -1: not about one client; EVERY: of each; RANGE: the largest less the smallest
    round: int | None

    @classmethod
    def parse(cls, text: str) -> Source:
        match = SOURCE.match(text)
        assert match is not None, text  # checked when the suite was read
        client, round = match["client"], match["round"]
        return cls(
            text,
            match["stage"] or match["over"] or "evaluation",
            match["metric"] or match["metrics"],
            INDICES[client] if client in INDICES else int(client),
            None if round is None else int(round),
        )

    def shows(self, evaluation: Evaluation) -> bool:
        """Whether its number is that of this evaluation, or is computed from it and others."""
        if self.stage in OVER:
            return not {evaluation.label, evaluation.sweep}.isdisjoint(self.metric.split("+"))
        return evaluation.label == self.metric

    def checkpoint(self, select: str) -> str:
        """The checkpoint of a number, `select` for evaluations; empty where the source names its rounds."""
        if self.stage == "gap" or self.round is not None:
            return ""
        return "last" if self.stage in ("train", "artifact") else select

    @property
    def index_noun(self) -> str:
        """The noun that the index of "metric[*]" counts: "client", "class" or "epochs"."""
        if self.metric == "updated_fraction":
            return "epochs"
        return "class" if self.metric.endswith("_class") or self.metric.startswith("label_") else "client"

    def index_text(self, index: int) -> str:
        """An index as tables and figures print it: clients count from 1, as in the papers, all else from 0."""
        return str(index + (self.index_noun == "client"))

    @property
    def fraction(self) -> bool:
        """Whether its numbers are fractions in [0, 1], printed as per cent: accuracies and metrics declared so."""
        return self.stage != "train" or self.metric in facts.fractions()


def metric_names(sources: Iterable[Source]) -> dict[str, str]:
    """Source -> the name of its number in JSON and CSV: that of the metric, "psnr", "weight[3]", "gap:pgd20".

    Numbers of one table that would share a name are kept apart by their round: "natural@10"; and a training number
    after the last round from an evaluation: "natural@last".
    """
    by_name: dict[str, dict[str, Source]] = {}
    for source in sources:
        base_name = source.metric if source.stage in ("evaluation", "train") else f"{source.stage}:{source.metric}"
        client = f"[{source.client}]" if source.client >= 0 else "[range]" * (source.client == RANGE)
        by_name.setdefault(base_name + client, {})[source.text] = source
    names = {}
    for name, same_name in by_name.items():
        evaluated = any(source.stage == "evaluation" for source in same_name.values())
        for text, source in same_name.items():
            round_or_last = source.round or ("last" if evaluated else None)
            needs_round = len(same_name) > 1 and source.stage == "train" and round_or_last is not None
            names[text] = f"{name}@{round_or_last}" if needs_round else name
    return names


def quoted(heading: str) -> str:
    """A heading as footers list it: one with a comma stands in quotes, since they list with commas."""
    return f"'{heading}'" if "," in heading else heading


def in_words(headings: Iterable[tuple[str, Source]]) -> dict[str, str]:
    """Metric of an evaluation -> the heading that shows it, as a footer says it; several: "'NT' and 'AT'".

    headings: (heading, source) pairs. A heading of the accuracy itself goes before those of what is
    derived from it.
    """
    headings_by_metric: dict[str, dict[bool, list[str]]] = {}  # metric -> derived -> headings
    for heading, source in headings:
        if source.stage not in ("train", "artifact", *OVER):
            headings_by_metric.setdefault(source.metric, {}).setdefault(source.stage != "evaluation", []).append(
                quoted(heading)
            )
    return {
        metric: " and ".join(dict.fromkeys(by_derived.get(False) or by_derived[True]))
        for metric, by_derived in headings_by_metric.items()
    }


CLIENT = "client"  # the axis of rows that a source "metric[*]" makes


def clients(cells: Iterable[Cell], source: Source) -> int:
    """The number of clients of "metric[*]": those of the transfer, else those of the partition."""
    count = 0
    for cell in cells:
        origins = [evaluation.origin for evaluation in cell.evaluations if evaluation.label == source.metric]
        transfer_clients = next((origin.clients for origin in origins if origin is not None and not origin.cell), None)
        count = max(count, transfer_clients or int(cell.spec["partition"].get("clients") or 0))
    return count


def range_of(values: Sequence[float]) -> float | None:
    """The largest value minus the smallest; None without values."""
    return max(values) - min(values) if values else None


def over_clients(source: Source, by_client: Mapping[int, float]) -> float | None:
    """The statistic of the clients' accuracies that a source "prior..." names; None without accuracies of them.

    A tenth is the mean of the ceil(K / 10) smallest, or largest; the standard deviation is that of the population.
    """
    values = sorted(by_client.values())
    if source.stage == PRIOR_STAGE or not values:
        return by_client.get(source.client)
    if source.stage == "prior_mean":
        return statistics.fmean(values)
    if source.stage == "prior_std":
        return statistics.pstdev(values)
    if source.stage == "prior_worst":
        return values[0]
    tenth = math.ceil(len(values) / 10)
    return statistics.fmean(values[-tenth:] if source.stage == "prior_best_tenth" else values[:tenth])


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation (ddof 1), None of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


NO_INPUTS: Inputs = {}


@dataclass(slots=True)  # a table of ten thousand cells makes fifty thousand
class Measurement:
    """One seed's number: for a field of a table, a point of a figure or a side of a comparison."""

    value: float
    n: int  # test images
    outcomes: ImageOutcomes | None = (
        None  # of every image, by each model that is deployed; None: not stored, or not read
    )
    doubts: tuple[Doubt, ...] = ()
    stages: tuple[str, ...] = ()  # those that it was read from, the last is an evaluation's
    inputs: Inputs = field(default_factory=lambda: NO_INPUTS)  # what answered it, see `fatbench.store.inputs`
    groups: Groups | None = field(default=None, compare=False)  # of its images; None: each is its own

    @property
    def stage(self) -> str:
        """The stage of the evaluation."""
        return self.stages[-1] if self.stages else ""

    @property
    def precision(self) -> str:
        """The precision of the attack."""
        return parsed(self.stage).precision


Series = dict[int, dict[int, tuple[float, int]]]  # client, -1: about none -> round -> (value, n)


class Numbers:
    """The stored numbers that a view needs, found by cell and source.

    rounds: (cell, checkpoint) -> round of its model, "last" among them. doubts: those about evaluations. outcomes: of
    the images of a stage. inputs: reads what answered each stage. runs: (cell, stage), or (None, stage) where all cells
    share it -> what ran. failed: cells of which something failed and was not run again since. trained: cells whose
    training is done. checkpoints: those that are evaluated.
    """

    def __init__(
        self,
        rows: Sequence[Number] = (),
        select: Checkpoint = "last",
        *,
        rounds: Mapping[tuple[str, str], int] = MappingProxyType({}),
        doubts: Doubts | None = None,
        outcomes: Outcomes | None = None,
        inputs: Callable[[], Mapping[tuple[str, str], Inputs]] = dict,
        runs: Mapping[tuple[str | None, str], Collection[Origin]] = MappingProxyType({}),
        failed: frozenset[str] = frozenset(),
        trained: frozenset[str] = frozenset(),
        checkpoints: Collection[str] = (),
    ) -> None:
        self.select, self.rounds, self.doubts, self.outcomes, self.inputs = (
            select,
            rounds,
            doubts or {},
            outcomes,
            inputs,
        )
        self.runs, self.failed, self.trained, self.checkpoints = runs, failed, trained, checkpoints
        accuracies: list[Number] = []
        others: list[Number] = []
        for row in rows:
            (accuracies if row.is_accuracy else others).append(row)
        self.accuracies = {(row.cell, row.stage): (row.value, row.n) for row in accuracies}
        self.series: dict[tuple[str, str, str], Series] = {}  # of each cell, stage and metric, without accuracies
        self.add(others)
        self.cell_counts = Counter(row.stage for row in accuracies)  # stage -> cells that have its accuracy
        # (cell, round of the model) -> evaluation -> its stage: in the precision of most cells, then the highest
        self.evaluations: dict[tuple[str, int], dict[str, str]] = {}
        for row in sorted(accuracies, key=self._preference):  # the last one stays
            name = parsed(row.stage)
            self.evaluations.setdefault((row.cell, name.round), {})[name.evaluation] = row.stage

    def add(self, rows: Iterable[Number]) -> None:
        """Add numbers of training."""
        for cell, stage, round, client, metric, value, n, *_ in rows:
            self.series.setdefault((cell, stage, metric), {}).setdefault(client, {})[round] = value, n

    def _preference(self, row: Number) -> tuple[int, int]:
        return self.cell_counts[row.stage], -PRECISIONS.index(parsed(row.stage).precision)

    def origins(self, cell: str, stage: str) -> Collection[Origin]:
        """The origins of a stage of a cell: the machines and code that ran it."""
        return self.runs.get((cell, stage)) or self.runs.get((None, stage)) or ()

    def images(self, cell: str, stage: str) -> set[str]:
        """The fingerprints of the data that a stage was measured on, as far as its runs say."""
        return {origin.data[2] for origin in self.origins(cell, stage) if origin.data is not None and origin.data[2]}

    def logged(self, cell: str, metric: str) -> dict[int, dict[int, float]]:
        """Client -> round -> each finite number that training has logged."""
        return {
            client: {round: value for round, (value, _) in by_round.items() if math.isfinite(value)}
            for client, by_round in self.series.get((cell, "train", metric), {}).items()
        }

    def evaluated(self, cell: str) -> dict[str, Measurement]:
        """Evaluation ("pgd20-0a1b2c3d": attack, images and batch) -> a cell's number at the checkpoint, for tests."""
        stage_by_evaluation = self.evaluations.get((cell, self.rounds.get((cell, self.select), -1)), {})
        numbers = {evaluation: self._accuracy(cell, stage) for evaluation, stage in sorted(stage_by_evaluation.items())}
        for number in numbers.values():
            bits, total = (self.outcomes and self.outcomes(cell, number.stage)) or (0, 0)
            number.outcomes = (bits, total) if number.n and total and total % number.n == 0 else None
            number.inputs = self.inputs().get((cell, number.stage), {})
        return numbers

    def find(self, cell: Cell, source: Source) -> Measurement | None:
        """One cell's number for a column; None if it is not measured."""
        if source.stage == "train":
            return self._logged_number(cell, source)
        if source.stage == "gap":
            best = self._evaluation(cell, "best-test", source.metric)
            last_evaluation = self._evaluation(cell, "last", source.metric)
            if best is None or last_evaluation is None:
                return None
            stages = (*best.stages, *last_evaluation.stages[1:])
            return Measurement(best.value - last_evaluation.value, best.n, stages=stages)
        if source.stage in OVER:
            return self._combine_evaluations(cell, source)
        overall = self._evaluation(cell, self.select, source.metric)
        is_prior = source.stage.startswith(PRIOR_STAGE)
        if overall is None or (source.client == -1 and not is_prior):
            return overall
        metric, round = PRIOR if is_prior else source.metric, self.rounds[cell.id, self.select]
        by_client = {
            client: by_round[round]
            for client, by_round in self.series.get((cell.id, overall.stage, metric), {}).items()
            if round in by_round
        }
        if is_prior:
            value = over_clients(source, {client: value for client, (value, _) in by_client.items()})
            return None if value is None else Measurement(value, overall.n, stages=overall.stages)
        if source.client not in by_client:
            return None
        value, n = by_client[source.client]
        return replace(overall, value=value, n=n)

    def _logged_number(self, cell: Cell, source: Source) -> Measurement | None:
        """A number of training in the source's round, by default the last."""
        series = self.series.get((cell.id, "train", source.metric), {})
        round = source.round or self.rounds.get((cell.id, "last"), 0)
        if source.client == RANGE:
            numbers = [by_round[round] for client, by_round in series.items() if client >= 0 and round in by_round]
            value = range_of([value for value, _ in numbers])
            return None if value is None else Measurement(value, sum(n for _, n in numbers), stages=("train",))
        number = series.get(source.client, {}).get(round)
        if number is None:
            return self._interval(cell.id, source.metric) if source.client == -1 else None
        return Measurement(*number, stages=("train",))

    def _interval(self, cell: str, metric: str) -> Measurement | None:
        """An end of Wilson's 95 % interval of a fraction over clients: "identification_low" or "..._high"."""
        base, _, end = metric.rpartition("_")
        series = self.series.get((cell, "train", f"{base}_client"), {})
        values = [value for by_round in series.values() for value, _ in by_round.values()]  # over all rounds
        if not values or end not in ENDS or not {*values} <= {0.0, 1.0}:
            return None
        end_value = wilson(int(sum(values)), len(values))[ENDS.index(end)]
        return Measurement(end_value, len(values), stages=("train",))

    def _combine_evaluations(self, cell: Cell, source: Source) -> Measurement | None:
        """The mean over evaluations, or the fraction of images that are right under all of them."""
        labels = [evaluation.label for evaluation in cell.evaluations if source.shows(evaluation)]
        evaluations = [self._evaluation(cell, self.select, label) for label in labels]
        measured = [number for number in evaluations if number is not None]
        if not measured or len(measured) < len(evaluations):
            return None
        value = statistics.fmean(number.value for number in measured)
        if source.stage == "all":
            stored_outcomes = [self.outcomes(cell.id, number.stage) for number in measured] if self.outcomes else [None]
            outcome_bits = [bits_and_n for bits_and_n in stored_outcomes if bits_and_n and bits_and_n[1]]
            if (
                len(outcome_bits) < len(measured) or len({n for _, n in outcome_bits}) > 1
            ):  # not of the same images and models
                return None
            # an image counts where its bit is set under every evaluation
            value = functools.reduce(int.__and__, (bits for bits, _ in outcome_bits)).bit_count() / outcome_bits[0][1]
        reasons = tuple(dict.fromkeys(doubt for number in measured for doubt in number.doubts))
        stages = tuple(dict.fromkeys(stage for number in measured for stage in number.stages))
        return Measurement(value, min(number.n for number in measured), doubts=reasons, stages=stages)

    def below_chance(self, cell: Cell) -> tuple[float, int, float] | None:
        """(natural accuracy, images, chance) of a cell that has not learned; None if it has or chance is unknown."""
        natural = self._evaluation(cell, self.select, "natural")
        chances = [doubt.value for doubt in natural.doubts if doubt.code == "chance"] if natural else []
        return (natural.value, natural.n, chances[0]) if natural and chances else None

    def _evaluation(self, cell: Cell, checkpoint: str, metric: str) -> Measurement | None:
        """An evaluation of a cell at a checkpoint with its doubts, the one that most cells have; None: not made."""
        stages = self.evaluations.get((cell.id, self.rounds.get((cell.id, checkpoint), -1)))
        if stages is None:
            return None
        stored = [stages[item.id] for item in cell.evaluations if item.label == metric and item.id in stages]
        return self._accuracy(cell.id, max(stored, key=self.cell_counts.__getitem__)) if stored else None

    def _accuracy(self, cell: str, stage: str) -> Measurement:
        value, n = self.accuracies[cell, stage]
        return Measurement(value, n, None, self.doubts.get((cell, stage), ()), ("train", stage))
