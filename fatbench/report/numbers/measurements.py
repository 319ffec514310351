"""Sources of a suite file, and the measurements that they select."""

from __future__ import annotations

import functools
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fatbench.report.numbers import provenance
from fatbench.report.numbers.doubts import Doubt, Doubts, Outcomes, doubts
from fatbench.report.numbers.statistics import wilson
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.store.stage_names import parsed
from fatbench.suite import facts
from fatbench.suite.tables import OVER, SOURCE

if TYPE_CHECKING:
    from fatbench.suite.cells import Cell, Evaluation, Plan

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


@dataclass(slots=True)
class Measurement:
    """One seed's number for one field of a table."""

    value: float
    n: int
    stages: tuple[str, ...]  # what was read
    doubts: tuple[Doubt, ...] = ()


class Numbers:
    """The measurements of a plan's cells that tables and figures need, by cell, stage, metric, round and client.

    rows: measurements (cell, stage, metric, round, client, value, n; with device, precision, commit, ... or a
    `provenance` mapping). rounds: (cell, "best-test" or "best-val") -> round; one that it lacks is found in the rows of
    stage "train". runs: what ran, with its provenance; None: what the rows say. failed: cells of which something
    failed and was not run again since. trained: cells whose training is done. known_doubts: those about evaluations;
    None: what these rows and the plan say.
    """

    def __init__(
        self,
        plan: Plan,
        rows: Collection[Mapping[str, Any]] = (),
        select: Checkpoint = "last",
        *,
        rounds: Mapping[tuple[str, str], int] = MappingProxyType({}),
        runs: Iterable[Mapping[str, Any]] | None = None,
        outcomes: Outcomes | None = None,
        failed: frozenset[str] = frozenset(),
        trained: frozenset[str] = frozenset(),
        known_doubts: Doubts | None = None,
    ) -> None:
        self.select, self.rounds, self.outcomes, self.failed = select, rounds, outcomes, failed
        self.trained, self.checkpoints = trained, tuple(plan.checkpoints)
        self.by_key: dict[tuple[str, str, str, int, int], tuple[float, int]] = {}
        self.measured = Counter(  # stage -> cells that have its accuracy
            row["stage"] for row in rows if row.get("client", -1) == -1 and row["metric"] == parsed(row["stage"]).metric
        )
        self.by_client: dict[tuple[str, str], list[float]] = {}  # (cell, metric) -> one a client, over all rounds
        # (cell, metric, round) -> the value and n of each client, class or epoch
        self.indexed: dict[tuple[str, str, int], list[tuple[float, int]]] = {}
        self.series: dict[tuple[str, str], dict[int, float]] = {}
        self.priors: dict[tuple[str, str], dict[int, float]] = {}  # (cell, stage) -> client -> accuracy
        self.last = {cell.id: int(cell.spec["algorithm"]["rounds"]) for cell in plan.cells}
        self.stages: dict[tuple[int, str, int], Sequence[str]] = {}  # (id of evaluations, metric, round) -> stage names
        origins = provenance.Origins()
        # (cell, stage), or (None, stage) where all cells share the origin -> an ordered set
        self.provenance: dict[tuple[str | None, str], dict[provenance.Origin, None]] = {}
        monitored = set(MONITORED.values())
        for row in rows:
            cell, stage, metric = row["cell"], row["stage"], row["metric"]
            round, client = row["round"], row.get("client", -1)
            self.by_key[cell, stage, metric, round, client] = (row["value"], row.get("n") or 0)
            if stage == "train":
                if metric in monitored and client == -1:
                    self.series.setdefault((cell, metric), {})[round] = row["value"]
                if client >= 0:
                    self.indexed.setdefault((cell, metric, round), []).append((row["value"], row.get("n") or 0))
                if metric.endswith("_client"):
                    self.by_client.setdefault((cell, metric), []).append(row["value"])
            elif metric == PRIOR:
                self.priors.setdefault((cell, stage), {})[client] = row["value"]
            if runs is None:
                self.provenance.setdefault((cell, stage), {})[origins.of(row)] = None
        self.doubts = doubts(rows, *_attacks_and_data(plan), outcomes) if known_doubts is None else known_doubts
        for run in runs or ():
            self.provenance.setdefault((run["cell"], run["stage"]), {})[origins.of(run)] = None

    def origins(self, cell: str, stage: str) -> Iterable[provenance.Origin]:
        """The origins of a stage of a cell: the machines and code that ran it."""
        return self.provenance.get((cell, stage)) or self.provenance.get((None, stage)) or ()

    def images(self, cell: str, stage: str) -> set[str]:
        """The fingerprints of the data that a stage was measured on, as far as its runs say."""
        return {origin.data[2] for origin in self.origins(cell, stage) if origin.data is not None and origin.data[2]}

    def round(self, cell: str, checkpoint: str) -> int | None:
        """The round whose model a checkpoint is; None while it is unknown."""
        if checkpoint == "last":
            return self.last[cell]
        if (recorded := self.rounds.get((cell, checkpoint))) is not None:
            return recorded
        return checkpoint_round(self.series.get((cell, MONITORED[checkpoint]), {}))

    def find(self, cell: Cell, source: Source) -> Measurement | None:
        """One cell's number for a column; None if it is not measured."""
        if source.stage == "train":
            round = source.round or self.last[cell.id]
            if source.client == RANGE:
                client_values = self.indexed.get((cell.id, source.metric, round), [])
                value = range_of([client_value for client_value, _ in client_values])
                return None if value is None else Measurement(value, sum(n for _, n in client_values), ("train",))
            row = self.by_key.get((cell.id, "train", source.metric, round, source.client))
            if row is None:
                return self._interval(cell.id, source.metric) if source.client == -1 else None
            return Measurement(row[0], row[1], ("train",))
        if source.stage == "gap":
            best = self._evaluation(cell, "best-test", source.metric)
            last_evaluation = self._evaluation(cell, "last", source.metric)
            if best is None or last_evaluation is None:
                return None
            return Measurement(best.value - last_evaluation.value, best.n, (*best.stages, *last_evaluation.stages[1:]))
        if source.stage in OVER:
            return self._combine_evaluations(cell, source)
        if source.stage.startswith(PRIOR_STAGE):
            overall = self._evaluation(cell, self.select, source.metric)
            by_client = {} if overall is None else self.priors.get((cell.id, overall.stages[-1]), {})
            value = over_clients(source, by_client)
            return None if overall is None or value is None else Measurement(value, overall.n, overall.stages)
        overall = self._evaluation(cell, self.select, source.metric)
        if overall is None or source.client == -1:
            return overall
        selected_round = self.round(cell.id, self.select) or 0
        row = self.by_key.get((cell.id, overall.stages[-1], source.metric, selected_round, source.client))
        return None if row is None else replace(overall, value=row[0], n=row[1])

    def _interval(self, cell: str, metric: str) -> Measurement | None:
        """An end of Wilson's 95 % interval of a fraction over clients: "identification_low" or "..._high"."""
        base, _, end = metric.rpartition("_")
        values = self.by_client.get((cell, f"{base}_client"))
        if values is None or end not in ENDS or not {*values} <= {0.0, 1.0}:
            return None
        return Measurement(wilson(int(sum(values)), len(values))[ENDS.index(end)], len(values), ("train",))

    def _combine_evaluations(self, cell: Cell, source: Source) -> Measurement | None:
        """The mean over evaluations, or the fraction of images that are right under all of them."""
        labels = [evaluation.label for evaluation in cell.evaluations if source.shows(evaluation)]
        evaluations = [self._evaluation(cell, self.select, label) for label in labels]
        measured = [number for number in evaluations if number is not None]
        if not measured or len(measured) < len(evaluations):
            return None
        value = statistics.fmean(number.value for number in measured)
        if source.stage == "all":
            stored_outcomes = (
                [self.outcomes(cell.id, number.stages[-1]) for number in measured] if self.outcomes else [None]
            )
            outcome_bits = [bits_and_n for bits_and_n in stored_outcomes if bits_and_n is not None]
            if (
                len(outcome_bits) < len(measured) or len({n for _, n in outcome_bits}) > 1
            ):  # not of the same images and models
                return None
            # an image counts where its bit is set under every evaluation
            value = functools.reduce(int.__and__, (bits for bits, _ in outcome_bits)).bit_count() / outcome_bits[0][1]
        reasons = dict.fromkeys(doubt for number in measured for doubt in number.doubts)
        stages = dict.fromkeys(stage for number in measured for stage in number.stages)
        return Measurement(value, min(number.n for number in measured), tuple(stages), tuple(reasons))

    def below_chance(self, cell: Cell) -> tuple[float, int, float] | None:
        """(natural accuracy, images, chance) of a cell that has not learned; None if it has or chance is unknown."""
        natural = self._evaluation(cell, self.select, "natural")
        chances = [doubt.value for doubt in natural.doubts if doubt.code == "chance"] if natural else []
        return (natural.value, natural.n, chances[0]) if natural and chances else None

    def _evaluation(self, cell: Cell, checkpoint: str, metric: str) -> Measurement | None:
        """An evaluation of a cell at a checkpoint with its doubts; None: it has not been made.

        Attacked in several precisions: that in which most cells are, else the highest.
        """
        round = self.round(cell.id, checkpoint)
        if round is None:
            return None
        for stage in self._stages(cell, metric, round):
            row = self.by_key.get((cell.id, stage, metric, round, -1))
            if row is not None:
                return Measurement(*row, ("train", stage), self.doubts.get((cell.id, stage), ()))
        return None

    def _stages(self, cell: Cell, metric: str, round: int) -> Sequence[str]:
        """The stages that may hold an evaluation of a round, the one that most cells have first."""
        key = id(cell.evaluations), metric, round  # the seeds of a point share one tuple of evaluations
        if key not in self.stages:
            evaluations = (evaluation for evaluation in cell.evaluations if evaluation.label == metric)
            measured = [
                stage for evaluation in evaluations for stage in evaluation.stages(round) if stage in self.measured
            ]
            self.stages[key] = sorted(measured, key=self.measured.__getitem__, reverse=True)
        return self.stages[key]


def _attacks_and_data(plan: Plan) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """(evaluation -> its attack as a run stores it, cell -> its data set)."""
    attacks = {
        evaluation.id: evaluation.attack
        if evaluation.origin is None
        else {**evaluation.attack, "origin": evaluation.origin.stored_text}
        for evaluations in {id(cell.evaluations): cell.evaluations for cell in plan.cells}.values()
        for evaluation in evaluations
    }
    return attacks, {cell.id: cell.spec["data"] for cell in plan.cells}
