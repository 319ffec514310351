"""Decide whether a cell that was trained again agrees with a file; every finished number of the file counts.

On the same machine all numbers are the same to the last bit. On another one training is another training: networks
differ by up to about two points either way, and in about one outcome of ten. So there each accuracy has a band, and all
together must look like chance: outcomes that changed both ways, and cells that are not all on one side.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING

from fatbench.report.numbers.statistics import binomial_tail
from fatbench.report.numbers.stored import numbers_of
from fatbench.report.pairs import label, measured_numbers
from fatbench.store.doubt_names import PREFIX
from fatbench.store.problems import FRACTIONS
from fatbench.store.rows import grouped
from fatbench.store.schema import NUMBERS
from fatbench.store.selection import WORDS

if TYPE_CHECKING:
    from fatbench.store.stages import Store

TOLERANCE = 0.02  # largest difference of an accuracy on another machine
RELATIVE = 0.25  # largest relative difference there of a training number that is no accuracy, over its rounds
AGREEMENT = 0.8  # least fraction of outcomes that are the same there; bfloat16 against float32 gives 0.85
ONE_SIDED = 0.5  # largest |b - c| / (b + c) there of the b + c outcomes that changed, where chance is excluded
LEVEL, OF_OUTCOMES = 0.01, 0.001  # of the sign tests over cells, and over outcomes
EXPECTED = "networks that are trained again elsewhere differ by up to about 2 points either way, in 1 outcome of 10"
CLOCK = ("seconds",)  # tells of the machine alone

Numbers = dict[tuple[str, int], dict[int, tuple[float, int]]]  # (metric, client) -> round -> (value, n)


@dataclass(frozen=True)
class NumberPair:
    """A number of a cell in the file and in a new run; of training, the mean over its rounds."""

    cell: str
    metric: str  # "pgd20 (last)", or "train_loss of training"
    theirs: float
    ours: float
    far: float  # the largest difference of any round, absolute
    images: tuple[int, int, int] | None = None  # right only there, only here, of how many; None: no outcomes
    band: float = TOLERANCE  # largest difference of the means that another machine explains
    precisions: tuple[str, str] = ("fp32", "fp32")  # of the attack, there and here

    @property
    def evaluated(self) -> bool:
        """Whether the number is the accuracy of an evaluation."""
        return self.images is not None

    @property
    def agreement(self) -> float | None:
        """Fraction of the test images with the same outcome."""
        return None if self.images is None else 1 - sum(self.images[:2]) / self.images[2]

    @property
    def beyond(self) -> bool:
        """Whether the difference is larger than another machine explains."""
        return round(abs(self.theirs - self.ours), 12) > self.band  # 0.594 and 0.574 are 0.02 apart


def compared_numbers(their_store: Store, our_store: Store, cell: str) -> tuple[list[NumberPair], list[str]]:
    """(each finished number of a cell on both sides, evaluations first; the names of those not compared)."""
    accuracies_compared: list[NumberPair] = []
    compared = {"train"}
    stages = {name: row for (_, name), row in their_store.stages([cell]).items()}
    numbers = [_numbers(store, cell) for store in (their_store, our_store)]
    side_numbers: list[NumberPair] = []
    not_compared: list[str] = []
    for checkpoint in WORDS:
        their_evaluations, our_evaluations = (
            measured_numbers(store, [cell], checkpoint)[cell]  # type: ignore[arg-type]
            for store in (their_store, our_store)
        )
        for evaluation in sorted(their_evaluations.keys() & our_evaluations.keys()):
            their_number, our_number = their_evaluations[evaluation], our_evaluations[evaluation]
            name = f"{label(evaluation)} ({checkpoint})"
            compared.add(their_number.stage)
            theirs, ours = their_number.outcomes, our_number.outcomes
            if theirs is None or ours is None or theirs[1] != ours[1]:
                not_compared.append(f"{their_number.stage} of cell {cell}: its outcomes are not of the same images")
                continue
            (their_bits, total), (our_bits, _) = theirs, ours
            images = (their_bits & ~our_bits).bit_count(), (our_bits & ~their_bits).bit_count(), total
            values, precisions = (their_number.value, our_number.value), (their_number.precision, our_number.precision)
            far = abs(values[0] - values[1])
            accuracies_compared.append(NumberPair(cell, name, *values, far, images, precisions=precisions))
            sides = numbers[0].get(their_number.stage, {}), numbers[1].get(our_number.stage, {})
            further, one_sided = _series(cell, f" of {name}", sides, label(evaluation))
            side_numbers += further
            not_compared += [f"{metric_name} of cell {cell}" for metric_name in one_sided]
    further, one_sided = _series(cell, " of training", (numbers[0].get("train", {}), numbers[1].get("train", {})))
    not_compared += [f"{metric_name} of cell {cell}" for metric_name in one_sided]
    finished = (name for name, row in stages.items() if row.status == "done" and name not in compared)
    unknown = {name for name, row in stages.items() if row.settings is not None and "requested" not in row.record}
    reason = ": which images it attacked is not stored (a file of before 28 November 2026)"
    not_compared += [f"{name} of cell {cell}{reason * (name in unknown)}" for name in finished]
    return [*accuracies_compared, *side_numbers, *further], not_compared


def _numbers(store: Store, cell: str) -> dict[str, Numbers]:
    """Finished stage -> its numbers."""
    finished = {name for (_, name), row in store.stages([cell]).items() if row.status == "done"}
    numbers_by_stage: dict[str, Numbers] = {}
    for _, stage, round, client, metric, value, n, *_ in numbers_of([cell], store, NUMBERS.c.metric.not_in(CLOCK)):
        if stage in finished:
            series = numbers_by_stage.setdefault(stage, {}).setdefault((metric, client), {})
            series[round if stage == "train" else 0] = value, n
    return numbers_by_stage


def _series(
    cell: str, suffix: str, sides: tuple[Numbers, Numbers], accuracy_metric: str = ""
) -> tuple[list[NumberPair], list[str]]:
    """(a comparison for each metric and client or class over its rounds; the numbers that one side lacks).

    accuracy_metric: the metric of an evaluation; its accuracy over all models is not among them. What this version
    measures beside them is no part of the file; a doubt is: a file that lacks one says too much.
    """
    compared, one_sided = [], []
    their_numbers, our_numbers = sides
    for (metric, client), their_series in their_numbers.items():
        if (metric, client) == (accuracy_metric, -1):
            continue
        our_series = our_numbers.get((metric, client), {})
        name = f"{metric}{f'[{client}]' if client >= 0 else ''}{suffix}"
        if their_series.keys() != our_series.keys():
            rounds_apart = len(their_series.keys() ^ our_series.keys())
            one_sided.append(f"{name} in {rounds_apart} rounds" if our_series else name)
        if rounds := sorted(their_series.keys() & our_series.keys()):
            means = [fmean(side[round][0] for round in rounds) for side in (their_series, our_series)]
            largest_distance = max(abs(their_series[round][0] - our_series[round][0]) for round in rounds)
            n = min(their_series[round][1] for round in rounds)
            band = RELATIVE * max(map(abs, means))
            if metric in {*FRACTIONS, accuracy_metric}:  # few images of a class widen it
                middle = min(max(fmean(means), 0.0), 1.0)
                band = max(TOLERANCE, 3 * math.sqrt(middle * (1 - middle) / n) if n else 0.0)
            compared.append(NumberPair(cell, name, means[0], means[1], largest_distance, band=band))
    new_doubts = (name for name, _ in our_numbers.keys() - their_numbers.keys() if name.startswith(PREFIX))
    one_sided += [f"the doubt '{name}'{suffix}" for name in new_doubts]
    return compared, one_sided


# --- all together ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """The result of all comparisons together."""

    numbers: Sequence[NumberPair]
    unverified: Sequence[str]  # numbers of the file that were not compared
    tolerance: float
    because: str  # why that tolerance
    reasons: Sequence[str]  # why the file does not agree; empty: it does

    @property
    def agrees(self) -> bool:
        return not self.reasons and not self.unverified

    @property
    def far(self) -> float:
        """The largest difference of an accuracy of an evaluation."""
        return max((round(number.far, 12) for number in self.numbers if number.evaluated), default=0.0)


def overall(
    numbers: Sequence[NumberPair], unverified: Sequence[str], elsewhere: str | None, tolerance: float | None = None
) -> Agreement:
    """Decide whether all comparisons agree. elsewhere: how this machine differs from the file's; None: it does not.

    tolerance: of accuracies, as whoever verifies asks; then nothing else counts. What the file says of its machine is
    not believed where training gave the same bits here: then nothing may differ.
    """
    if not numbers:
        return Agreement(numbers, unverified, 0.0, "nothing was compared", ["nothing was compared"])
    if tolerance is not None:
        beyond_tolerance = [number for number in numbers if number.evaluated and round(number.far, 12) > tolerance]
        return Agreement(numbers, unverified, tolerance, "--tolerance", list(map(_difference_text, beyond_tolerance)))
    trained = [number for number in numbers if _metric(number) == "train_loss"]
    if elsewhere is not None and trained and not any(number.far for number in trained):
        elsewhere, because = None, "training gave the same bits here"
    else:
        because = "same machine, torch and precision"
    if elsewhere is None:
        return Agreement(numbers, unverified, 0.0, because, [_difference_text(one) for one in numbers if one.far])
    reasons = [_difference_text(number) for number in numbers if number.beyond]
    reasons += _systematic_differences([number for number in numbers if number.evaluated])
    return Agreement(numbers, unverified, TOLERANCE, elsewhere, reasons)


def _difference_text(number: NumberPair) -> str:
    there, here = number_text(number, number.theirs), number_text(number, number.ours)
    return f"{number.metric} of cell {number.cell} is {there} there and {here} here"


def _pair_text(number: NumberPair) -> str:
    return f"{number_text(number, number.theirs)}, {number_text(number, number.ours)}"


def _metric(number: NumberPair) -> str:
    return number.metric.partition(" ")[0].partition("[")[0]


def number_text(number: NumberPair, value: float) -> str:
    """A number as people read it: accuracies in per cent."""
    return f"{100 * value:.2f} %" if number.evaluated or _metric(number) in FRACTIONS else f"{value:.6g}"


def _systematic_differences(accuracies: Sequence[NumberPair]) -> Iterable[str]:
    """Systematic differences of all accuracies together, which chance on another machine does not explain."""
    images = [one.images for one in accuracies if one.images is not None]
    only_theirs, only_ours, total = (sum(one[i] for one in images) for i in range(3))
    changed = only_theirs + only_ours
    if total and changed > round((1 - AGREEMENT) * total):
        yield f"only {100 * (1 - changed / total):.1f} % of all outcomes agree: {EXPECTED}"
    is_one_sided = abs(only_theirs - only_ours) > ONE_SIDED * changed
    if is_one_sided and _one_sided(max(only_theirs, only_ours), changed) < OF_OUTCOMES:
        sides = f"{only_theirs} are right only there and {only_ours} only here"
        yield f"of {changed} outcomes that changed {sides}: {EXPECTED}"
    by_cell = grouped((number.cell, number.theirs - number.ours) for number in accuracies)
    means = [mean for mean in map(fmean, by_cell.values()) if mean]
    cells_above = sum(mean > 0 for mean in means)
    most = max(cells_above, len(means) - cells_above)
    if means and _one_sided(most, len(means)) < LEVEL:
        side = "above" if cells_above else "below"
        yield f"{most} of {len(means)} cells are {side} what they are here: {EXPECTED}"


def _one_sided(larger_side: int, n: int) -> float:
    """p of a two-sided sign test in which the larger side has `larger_side` of n."""
    return min(1.0, 2 * binomial_tail(larger_side, n, 0.5))


def text(agreement: Agreement, notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """The agreement as text: the result, its reasons, and a block for each cell. notes: cell -> a further remark."""
    cells = list(dict.fromkeys(number.cell for number in agreement.numbers))
    images = [one.images for one in agreement.numbers if one.images is not None]
    changed, total = sum(one[0] + one[1] for one in images), sum(one[2] for one in images)
    share = f", {100 * (1 - changed / total):.1f} % of outcomes agree" if total else ""
    word = "agrees" if agreement.agrees else "differs" if agreement.reasons else "not verified"
    lines = [
        f"{word}: {_count(agreement.numbers, 'number')} of {_count(cells, 'cell')}, accuracies at most"
        f" {100 * agreement.far:.2f} points apart{share} (tolerance "
        f"{100 * agreement.tolerance:g}: {agreement.because})",
        *_first_lines("differs", agreement.reasons),
        *_first_lines("not verified", agreement.unverified),
    ]
    for cell in cells:
        cell_numbers = [number for number in agreement.numbers if number.cell == cell]
        training_numbers = [number for number in cell_numbers if not number.evaluated]
        lines.append(f"cell {cell}: there, here{notes.get(cell, '')}")
        for number in (number for number in cell_numbers if number.evaluated):
            agree = f"{100 * (number.agreement or 0):.1f} % of outcomes agree"
            lines.append(f"  {number.metric}: {_pair_text(number)}, {agree}")
        same = sum(not number.far for number in training_numbers)
        lines.append(f"  {_count(training_numbers, 'further number')}, {same} the same to the bit")
        lines += _first_lines("", [f"{one.metric}: {_pair_text(one)}" for one in training_numbers if one.far])
    return "\n".join(lines)


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'s' * (len(items) != 1)}"


MOST = 8  # lines of a kind


def _first_lines(head: str, lines: Sequence[str]) -> list[str]:
    remainder = [f"  and {len(lines) - MOST} more"] if len(lines) > MOST else []
    return [*(f"  {head}{': ' if head else ''}{line}" for line in lines[:MOST]), *remainder]
