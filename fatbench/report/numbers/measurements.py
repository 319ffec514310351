"""Which stored number stands in a place: the sources of a suite file, and the measurements they are found in."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fatbench.report.numbers import flags as checking
from fatbench.report.numbers import provenance
from fatbench.store.selection import MONITORED, Checkpoint, checkpoint_round
from fatbench.suite import facts
from fatbench.suite.cells import Cell, Evaluation, Plan
from fatbench.suite.tables import SOURCE

PRIOR_STAGE = "prior"
PRIOR = "prior_accuracy"  # per client, in the stage of an evaluation
EVERY = -2  # the client of a source "metric[*]": a line each


@dataclass(frozen=True)
class Source:
    """Where numbers come from: the parsed form of "pgd20", "train:drift_post@10", "gap:pgd20" or "train:weight[*]"."""

    text: str
    stage: str  # "evaluation", "train", "gap", "artifact", or "prior..." of the clients' own accuracies
    metric: str
    client: int  # -1: not about one client; EVERY: of each
    round: int | None

    @classmethod
    def parse(cls, text: str) -> Source:
        match = SOURCE.match(text)
        assert match is not None, text  # checked when the suite was read
        client, round = match["client"], match["round"]
        return cls(
            text,
            match["stage"] or "evaluation",
            match["metric"],
            -1 if client is None else EVERY if client == "*" else int(client),
            None if round is None else int(round),
        )

    @property
    def fraction(self) -> bool:
        """Whether it is a fraction in [0, 1], printed as per cent: an accuracy, or a metric declared as one."""
        return self.stage != "train" or self.metric in facts.fractions()


def metric_names(sources: Iterable[Source]) -> dict[str, str]:
    """Source -> the name of its number in JSON and CSV: that of the metric, "psnr", "weight[3]", "gap:pgd20".

    Numbers of one table that would share a name are kept apart by their round: "natural@10"; and a training number
    after the last round from an evaluation: "natural@last".
    """
    by_name: dict[str, dict[str, Source]] = {}
    for source in sources:
        own = source.metric if source.stage in ("evaluation", "train") else f"{source.stage}:{source.metric}"
        client = f"[{source.client}]" if source.client >= 0 else ""
        by_name.setdefault(own + client, {})[source.text] = source
    names = {}
    for name, alike in by_name.items():
        evaluated = any(source.stage == "evaluation" for source in alike.values())
        for text, source in alike.items():
            at = source.round or ("last" if evaluated else None)
            apart = len(alike) > 1 and source.stage == "train" and at is not None
            names[text] = f"{name}@{at}" if apart else name
    return names


CLIENT = "client"  # the axis of rows that a source "metric[*]" makes


def clients(cells: Iterable[Cell], source: Source) -> int:
    """How many clients "metric[*]" counts: those of the transfer, else those among which the data is dealt."""
    found = 0
    for cell in cells:
        origins = [one.origin for one in cell.evaluations if one.label == source.metric]
        many = next((origin.clients for origin in origins if origin is not None and not origin.cell), None)
        found = max(found, many or int(cell.spec["partition"].get("clients") or 0))
    return found


def over_clients(source: Source, by_client: Mapping[int, float]) -> float | None:
    """What a source "prior..." says of the clients' accuracies; None: there are none, or not of that client.

    The worst tenth is the mean of the ceil(K / 10) smallest; the standard deviation is that of the population.
    """
    values = sorted(by_client.values())
    if source.stage == PRIOR_STAGE or not values:
        return by_client.get(source.client)
    if source.stage == "prior_mean":
        return statistics.fmean(values)
    if source.stage == "prior_std":
        return statistics.pstdev(values)
    return statistics.fmean(values[: 1 if source.stage == "prior_worst" else -(-len(values) // 10)])


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation (ddof 1), None of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


# outcomes(cell, stage) -> (bits as one integer, number of examples) or None
Outcomes = Callable[[str, str], "tuple[int, int] | None"]


@dataclass
class Stored:
    """What the database has of a plan's cells, as far as tables and figures need it.

    rows: measurements (cell, stage, metric, round, client, value, n; with device, precision, commit, ... or a
    `provenance` mapping). A round that `rounds` lacks is found in the rows of stage "train".
    """

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    rounds: dict[tuple[str, str], int] = field(default_factory=dict)  # (cell, "best-test" or "best-val") -> round
    runs: list[Mapping[str, Any]] | None = None  # what ran, with its provenance; None: what the rows say
    outcomes: Outcomes | None = None
    failed: frozenset[str] = frozenset()  # cells of which something failed, and was not run again since


@dataclass(slots=True)
class Measurement:
    """One seed's number at one place of a table."""

    value: float
    n: int
    stages: tuple[str, ...]  # what was read
    flags: tuple[str, ...] = ()


class Stages:
    """Names of evaluation stages; an evaluation's hash is computed once, however many cells ask for it."""

    def __init__(self) -> None:
        self._by_content: dict[str, str] = {}
        self._by_object: dict[int, tuple[Evaluation, str]] = {}  # holds the object, so that its id stays its own
        self._names: dict[tuple[str, int], str] = {}

    def name(self, evaluation: Evaluation, round: int) -> str:
        """`evaluation.stage(round)`."""
        known = self._by_object.get(id(evaluation))
        if known is None:
            content = repr(evaluation)
            if content not in self._by_content:
                self._by_content[content] = evaluation.id
            known = self._by_object[id(evaluation)] = evaluation, self._by_content[content]
        name = self._names.get((known[1], round))
        if name is None:
            name = self._names[known[1], round] = evaluation.stage(round)
        return name


class Numbers:
    """The measurements of a plan, by cell, stage, metric, round and client."""

    def __init__(self, plan: Plan, stored: Stored, select: Checkpoint = "last") -> None:
        self.select, self.known, self.outcomes, self.failed = select, stored.rounds, stored.outcomes, stored.failed
        self.stages = Stages()
        self.by_key: dict[tuple[str, str, str, int, int], tuple[float, int]] = {}
        self.stored_flags: dict[tuple[str, str], list[str]] = {}
        self.series: dict[tuple[str, str], dict[int, float]] = {}
        self.priors: dict[tuple[str, str], dict[int, float]] = {}  # (cell, stage) -> client -> accuracy
        self.below: dict[tuple[str, str], tuple[float, int, float]] = {}  # (cell, checkpoint) -> see `below_chance`
        self.last = {cell.id: int(cell.spec["algorithm"]["rounds"]) for cell in plan.cells}
        self.evaluated: dict[tuple[str, str], dict[str, Measurement]] = {}  # (cell, checkpoint) -> metric -> number
        origins = provenance.Origins()
        # (cell, stage), or (None, stage) where all cells share the origin -> an ordered set
        self.provenance: dict[tuple[str | None, str], dict[provenance.Origin, None]] = {}
        monitored = set(MONITORED.values())
        for row in stored.rows:
            cell, stage, metric = row["cell"], row["stage"], row["metric"]
            round, client = row["round"], row.get("client", -1)
            self.by_key[cell, stage, metric, round, client] = (row["value"], row.get("n") or 0)
            if stage == "train":
                if metric in monitored and client == -1:
                    self.series.setdefault((cell, metric), {})[round] = row["value"]
            elif metric == PRIOR:
                self.priors.setdefault((cell, stage), {})[client] = row["value"]
            elif metric.startswith("flag_") and row["value"]:
                self.stored_flags.setdefault((cell, stage), []).append(metric.removeprefix("flag_").replace("_", " "))
            if stored.runs is None:
                self.provenance.setdefault((cell, stage), {})[origins.of(row)] = None
        for run in stored.runs or ():
            self.provenance.setdefault((run["cell"], run["stage"]), {})[origins.of(run)] = None

    def origins(self, cell: str, stage: str) -> Iterable[provenance.Origin]:
        """Where a stage of a cell was run."""
        return self.provenance.get((cell, stage)) or self.provenance.get((None, stage)) or ()

    def round(self, cell: str, checkpoint: str) -> int | None:
        """The round whose model a checkpoint is; None while it is not known."""
        if checkpoint == "last":
            return self.last[cell]
        if (known := self.known.get((cell, checkpoint))) is not None:
            return known
        return checkpoint_round(self.series.get((cell, MONITORED[checkpoint]), {}))

    def find(self, cell: Cell, source: Source) -> Measurement | None:
        """One cell's number for a column; None: not measured."""
        if source.stage == "train":
            round = source.round or self.last[cell.id]
            row = self.by_key.get((cell.id, "train", source.metric, round, source.client))
            return None if row is None else Measurement(row[0], row[1], ("train",))
        if source.stage == "gap":
            best = self._evaluations(cell, "best-test").get(source.metric)
            last = self._evaluations(cell, "last").get(source.metric)
            if best is None or last is None:
                return None
            return Measurement(best.value - last.value, best.n, (*best.stages, *last.stages[1:]))
        if source.stage.startswith(PRIOR_STAGE):
            whole = self._evaluations(cell, self.select).get(source.metric)
            by_client = {} if whole is None else self.priors.get((cell.id, whole.stages[-1]), {})
            value = over_clients(source, by_client)
            return None if whole is None or value is None else Measurement(value, whole.n, whole.stages)
        whole = self._evaluations(cell, self.select).get(source.metric)
        if whole is None or source.client == -1:
            return whole
        at = self.round(cell.id, self.select) or 0
        row = self.by_key.get((cell.id, whole.stages[-1], source.metric, at, source.client))
        return None if row is None else replace(whole, value=row[0], n=row[1])

    def below_chance(self, cell: Cell) -> tuple[float, int, float] | None:
        """(natural accuracy, images, chance) of a cell that has not learned; None: it has, or nobody knows."""
        self._evaluations(cell, self.select)
        return self.below.get((cell.id, self.select))

    def _evaluations(self, cell: Cell, checkpoint: str) -> dict[str, Measurement]:
        """Every evaluation that has been made of a cell at a checkpoint, by metric, with its flags."""
        known = self.evaluated.get((cell.id, checkpoint))
        if known is not None:
            return known
        found: dict[str, Measurement] = {}
        round = self.round(cell.id, checkpoint)
        if round is not None:
            for evaluation in cell.evaluations:
                stage = self.stages.name(evaluation, round)
                if row := self.by_key.get((cell.id, stage, evaluation.label, round, -1)):
                    found[evaluation.label] = Measurement(row[0], row[1], ("train", stage))
            self._check(cell, round, found, checkpoint)
        self.evaluated[cell.id, checkpoint] = found
        return found

    def _check(self, cell: Cell, round: int, found: dict[str, Measurement], checkpoint: str) -> None:
        """Set the flags of one model's evaluations, in words without the seed."""
        chain = [metric for metric in checking.CHAIN if metric in found]
        raised: dict[str, list[str]] = {}
        attacks = {evaluation.label: evaluation.attack for evaluation in cell.evaluations}
        moved = {one.label: one.origin.name for one in cell.evaluations if one.origin is not None and one.origin.cell}
        white = {
            one.label: next((e.label for e in cell.evaluations if e.origin is None and e.attack == one.attack), "")
            for one in cell.evaluations
            if one.label in moved
        }
        against = [(label, white[label]) for label in moved if label in found and white[label] in found]
        for weak, strong in [*itertools.combinations(chain, 2), *against]:
            easy, hard = found[weak], found[strong]
            if hard.value <= easy.value or not checking.same_ball(attacks[weak], attacks[strong]):
                continue
            paired = None
            if self.outcomes is not None and easy.n == hard.n:
                bits = [self.outcomes(cell.id, each.stages[-1]) for each in (easy, hard)]
                paired = checking.discordant(*bits)
            if checking.violated((easy.value, easy.n), (hard.value, hard.n), paired):
                on = f", which was computed on {moved[weak]}'s model," if weak in moved else ""
                raised.setdefault(strong, []).append(f"{strong} exceeds {weak}{on} by more than 3 standard errors")
        natural = found.get("natural")
        if natural and natural.n and math.isfinite(natural.value):
            stored = self.by_key.get((cell.id, natural.stages[-1], "chance", round, -1))
            fraction = checking.chance(cell.spec, stored and stored[0], natural.n)
            if fraction is not None and not checking.above_chance(natural.value, natural.n, fraction):
                self.below[cell.id, checkpoint] = natural.value, natural.n, fraction
                raised |= {metric: [checking.CHANCE, *raised.get(metric, ())] for metric in found}
        if natural:
            dead = self.by_key.get((cell.id, natural.stages[-1], "zero_gradients", round, -1))
            if dead is not None and dead[0] > checking.ZERO_GRADIENTS:
                for metric in found:
                    if attacks[metric]["name"] != "natural" and metric not in moved:
                        raised.setdefault(metric, []).append(checking.NO_GRADIENT)
        for metric, one in found.items():
            own = self.stored_flags.get((cell.id, one.stages[-1]), ()) if self.stored_flags else ()
            if not math.isfinite(one.value):
                raised.setdefault(metric, []).append("not a number")
            if own or metric in raised:
                one.flags = (*own, *raised.get(metric, ()))
