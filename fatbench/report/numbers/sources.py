"""Sources of a suite file ("pgd20", "train:drift_post@10"): what they name, and what their numbers are called."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fatbench.report.numbers.doubts import above_chance
from fatbench.report.numbers.statistics import OfClients, least_of_equals
from fatbench.store.problems import ROUNDING, mean_over_own_images
from fatbench.suite import facts
from fatbench.suite.tables import SOURCE

if TYPE_CHECKING:
    from fatbench.suite.cells import Cell, Evaluation

ENDS = ("low", "high")  # of an interval, as a metric's name ends: "identification_low"
PRIOR_STAGE = "prior"
PRIOR = "prior_accuracy"  # per client, in the stage of an evaluation
OVER_OWN = (  # over clients, each on its own images
    "pooled", "worst", "worst_if_equal", "tenth", "std", "not_above_chance", "below_chance", "unseen",
)  # fmt: skip
EVERY = -2  # the client of a source "metric[*]": a line each
INDICES = {None: -1, "*": EVERY}


@dataclass(frozen=True)
class Source:
    """The parsed form of a source: "pgd20", "train:drift_post@10", "gap:pgd20" or "train:weight[*]"."""

    text: str
    stage: str  # "evaluation", "train", "gap", "artifact", "prior..." of the clients' own accuracies, "all" or OVER_OWN
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
            (match["stage"] or match["over"] or "evaluation").replace("clients", "evaluation"),
            match["metric"] or match["metrics"],
            INDICES[client] if client in INDICES else int(client),
            None if round is None else int(round),
        )

    def shows(self, evaluation: Evaluation) -> bool:
        """Whether its number is that of this evaluation, or is computed from it and others."""
        if self.stage == "all":  # the images that stay correct under all of several
            return not {evaluation.label, evaluation.sweep}.isdisjoint(self.metric.split("+"))
        return evaluation.label == self.metric and (bool(evaluation.on) or self.stage not in OVER_OWN)

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
    def chance(self) -> Source:
        """The source of what random guesses would reach in its place, where training logs that."""
        return replace(self, metric=f"{self.metric}_chance", client=-1)

    @property
    def ends(self) -> list[tuple[str, str]]:
        """The metrics of its interval, where training logs one: the exact one first."""
        kinds = ("_exact", "") if self.stage == "train" and self.client == -1 else ()
        return [(f"{self.metric}{kind}_low", f"{self.metric}{kind}_high") for kind in kinds]

    @property
    def of_images(self) -> bool:
        """Whether a number is the mean of stored outcomes: of an evaluation over all clients."""
        return self.stage == "evaluation" and self.client == -1

    @property
    def fraction(self) -> bool:
        """Whether its numbers are fractions in [0, 1], printed as per cent: accuracies and metrics declared so."""
        return self.stage != "train" or self.metric in facts.fractions()


UNITS = {  # of a metric's last word, see docs/results.md
    "backward": "images", "bytes": "bytes", "down": "bytes", "flops": "operations", "forward": "images",
    "memory": "bytes", "loss": "nats", "psnr": "dB", "rounds": "rounds", "seconds": "s", "steps": "steps",
    "up": "bytes",
}  # fmt: skip
ABOUT = ("ci", "client", "class", "chance", *ENDS)  # the last words of a metric that is in the unit of another


def unit(training: bool, metric: str) -> str:
    """The unit of a stored number: "fraction" of what tables print as per cent, else as in UNITS; empty: none."""
    if not training:
        return UNITS["seconds"] if metric == "seconds" else "" if metric.startswith("doubt_") else "fraction"
    base = metric
    while (words := base.rpartition("_"))[2] in ABOUT and words[0]:
        base = words[0]
    return "fraction" if {base, metric} & facts.fractions() else UNITS.get(words[2], "")


def metric_names(sources: Iterable[Source]) -> dict[str, str]:
    """Source -> the name of its number in JSON and CSV: that of the metric, "psnr", "weight[3]", "gap:pgd20".

    Numbers of one table that would share a name are kept apart by their round: "natural@10"; and a training number
    after the last round from an evaluation: "natural@last".
    """
    by_name: dict[str, dict[str, Source]] = {}
    for source in sources:
        base_name = source.metric if source.stage in ("evaluation", "train") else f"{source.stage}:{source.metric}"
        client = f"[{source.client}]" if source.client >= 0 else ""
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
        if source.stage not in ("train", "artifact", "all"):
            headings_by_metric.setdefault(source.metric, {}).setdefault(source.stage != "evaluation", []).append(
                quoted(heading)
            )
    return {
        metric: " and ".join(dict.fromkeys(by_derived.get(False) or by_derived[True]))
        for metric, by_derived in headings_by_metric.items()
    }


def clients(cells: Iterable[Cell], source: Source) -> int:
    """The number of clients of "metric[*]": those of the transfer, else those of the partition."""
    count = 0
    for cell in cells:
        origins = [evaluation.origin for evaluation in cell.evaluations if evaluation.label == source.metric]
        transfer_clients = next((origin.clients for origin in origins if origin is not None and not origin.cell), None)
        count = max(count, transfer_clients or int(cell.spec["partition"].get("clients") or 0))
    return count


def over_clients(source: Source, by_client: Mapping[int, float]) -> float | None:
    """The statistic of the clients' accuracies that a source "prior..." or of OVER_OWN names; None without accuracies.

    A tenth is the mean of the ceil(K / 10) smallest; the standard deviation is that of the population.
    """
    values = sorted(by_client.values())
    if source.stage == PRIOR_STAGE or not values:
        return by_client.get(source.client)
    name = source.stage.removeprefix(f"{PRIOR_STAGE}_")
    if name == "std":
        return statistics.pstdev(values)
    if name in ("mean", "unseen", "evaluation"):
        return statistics.fmean(values)
    return values[0] if name == "worst" else statistics.fmean(values[: math.ceil(len(values) / 10)])


@dataclass(frozen=True)
class OwnImages:
    """What an evaluation says of each client on its own images: client -> (accuracy, images), or chance."""

    accuracies: Mapping[int, tuple[float, int]]
    unseen: Mapping[int, tuple[float, int]]  # of clients that never train
    chances: Mapping[int, float]
    images: str = ""  # equal in two seeds: the same clients

    def contradiction(self, value: float, n: int, bits: int, total: int) -> bool:
        """Whether a mean over clients on n images in all is not theirs, or a client's not that of its outcomes."""
        mean = mean_over_own_images(n, [*self.accuracies.values()])
        clients = {**self.accuracies, **self.unseen}
        shares = self.shares(bits, total)
        wrong = any(abs(shares.get(k, -1) - accuracy) > ROUNDING for k, (accuracy, _) in clients.items())
        return mean is None or abs(mean - value) > ROUNDING or wrong or total != sum(n for _, n in clients.values())

    @property
    def sizes(self) -> dict[int, int]:
        """Client -> its images."""
        return {k: images for k, (_, images) in sorted({**self.accuracies, **self.unseen}.items())}

    def _rights(self, bits: int, total: int) -> Iterator[tuple[int, int, int]]:
        """(client, its images, a bit for each, set where it is right); they stand in the order of numbers."""
        end = total
        for k, images in self.sizes.items():
            end -= images
            if end >= 0:
                yield k, images, bits >> end & (1 << images) - 1

    def shares(self, bits: int, total: int) -> dict[int, float]:
        """Client -> the fraction of its images whose bit is set."""
        return {k: rights.bit_count() / images for k, images, rights in self._rights(bits, total)}

    def first(self, bits: int, total: int, images: Mapping[int, int]) -> OwnImages:
        """These clients on the first so many of their images; outcomes as in `shares`."""
        found = {
            k: ((rights >> size - images[k]).bit_count() / images[k], images[k])
            for k, size, rights in self._rights(bits, total)
        }
        accuracies, unseen = ({k: found[k] for k in of} for of in (self.accuracies, self.unseen))
        return replace(self, accuracies=accuracies, unseen=unseen)

    def outcomes(self, value: float, n: int, is_mean: bool = True) -> OfClients:
        """A number over these clients as a test takes it."""
        accuracies = [accuracy for _, (accuracy, _) in sorted(self.accuracies.items())]
        return OfClients.of(value, n, accuracies, self.images) if is_mean else OfClients.of(value, n)

    def number(self, source: Source) -> tuple[float, int] | None:
        """(value, images) of a source of OVER_OWN, or of one client; None where nobody is."""
        if source.client != -1:
            return {**self.accuracies, **self.unseen}.get(source.client)
        clients = self.unseen if source.stage == "unseen" else self.accuracies
        n = sum(images for _, images in clients.values())
        if not n:
            return None
        pooled = math.fsum(value * images for value, images in clients.values()) / n
        if source.stage == "pooled":
            return pooled, n
        if source.stage == "worst_if_equal":
            return least_of_equals([images for _, images in clients.values()], pooled), n
        if source.stage == "below_chance":
            return statistics.fmean(value < self.chances[k] for k, (value, _) in clients.items()), n
        if source.stage == "not_above_chance":
            at_chance = [not above_chance(*of_client, self.chances[k]) for k, of_client in clients.items()]
            return statistics.fmean(at_chance), n
        value = over_clients(source, {k: accuracy for k, (accuracy, _) in clients.items()})
        return None if value is None else (value, n)


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and the sample standard deviation (ddof 1), None of one value."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
