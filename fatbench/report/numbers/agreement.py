"""Whether a cell that was trained again agrees with what a file says of it: every finished number of the file counts.

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

from fatbench.report.numbers.cell_rows import numbers_of
from fatbench.report.numbers.compare import label, measured
from fatbench.report.numbers.statistics import binomial_tail
from fatbench.store.consistency import FRACTIONS
from fatbench.store.doubt_names import PREFIX
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
class Apart:
    """One number of a cell, there and here; of a training the mean over its rounds."""

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
        """Whether it is the accuracy of an evaluation."""
        return self.images is not None

    @property
    def agreement(self) -> float | None:
        """Fraction of the test images with the same outcome."""
        return None if self.images is None else 1 - sum(self.images[:2]) / self.images[2]

    @property
    def beyond(self) -> bool:
        """Whether another machine does not explain it."""
        return round(abs(self.theirs - self.ours), 12) > self.band  # 0.594 and 0.574 are 0.02 apart


def apart(theirs: Store, ours: Store, cell: str) -> tuple[list[Apart], list[str]]:
    """(every finished number of a cell that both sides have, evaluations first; what of the file was not compared)."""
    found: list[Apart] = []
    compared = {"train"}
    stages = {name: row for (_, name), row in theirs.stages([cell]).items()}
    numbers = [_numbers(store, cell) for store in (theirs, ours)]
    beside: list[Apart] = []
    missing: list[str] = []
    for checkpoint in WORDS:
        there, here = (measured(store, [cell], checkpoint)[cell] for store in (theirs, ours))  # type: ignore[arg-type]
        for evaluation in sorted(there.keys() & here.keys()):
            one, other = there[evaluation], here[evaluation]
            name = f"{label(evaluation)} ({checkpoint})"
            compared.add(one.stage)
            if one.outcomes is None or other.outcomes is None or one.outcomes[1] != other.outcomes[1]:
                missing.append(f"{one.stage} of cell {cell}: its outcomes are not of the same images")
                continue
            (bits, total), (own, _) = one.outcomes, other.outcomes
            images = (bits & ~own).bit_count(), (own & ~bits).bit_count(), total
            far = abs(one.value - other.value)
            found.append(
                Apart(cell, name, one.value, other.value, far, images, precisions=(one.precision, other.precision))
            )
            sides = numbers[0].get(one.stage, {}), numbers[1].get(other.stage, {})
            more, without = _series(cell, f" of {name}", sides, label(evaluation))
            beside += more
            missing += [f"{what} of cell {cell}" for what in without]
    more, without = _series(cell, " of training", (numbers[0].get("train", {}), numbers[1].get("train", {})))
    missing += [f"{what} of cell {cell}" for what in without]
    done = (name for name, row in stages.items() if row.status == "done" and name not in compared)
    missing += [f"{name} of cell {cell}" for name in done]
    return [*found, *beside, *more], missing


def _numbers(store: Store, cell: str) -> dict[str, Numbers]:
    """Stage -> the numbers of a finished stage."""
    done = {name for (_, name), row in store.stages([cell]).items() if row.status == "done"}
    found: dict[str, Numbers] = {}
    rows = numbers_of([cell], store, NUMBERS.c.metric.not_in(CLOCK))
    for row in sorted(rows, key=lambda row: (row["stage"], row["round"], row["client"], row["metric"])):
        if row["stage"] in done:
            series = found.setdefault(row["stage"], {}).setdefault((row["metric"], row["client"]), {})
            series[row["round"] if row["stage"] == "train" else 0] = float(row["value"]), int(row["n"])
    return found


def _series(cell: str, of: str, sides: tuple[Numbers, Numbers], own: str = "") -> tuple[list[Apart], list[str]]:
    """(a number for each metric and client or class over its rounds; what one side lacks).

    own: the metric of an evaluation; its accuracy over all models is not among them. What this version measures beside
    them is no part of the file; a doubt is: a file that lacks one says too much.
    """
    found, missing = [], []
    theirs, ours = sides
    for (metric, client), there in theirs.items():
        if (metric, client) == (own, -1):
            continue
        here = ours.get((metric, client), {})
        name = f"{metric}{f'[{client}]' if client >= 0 else ''}{of}"
        if there.keys() != here.keys():
            missing.append(name if not here else f"{name} in {len(there.keys() ^ here.keys())} rounds")
        if rounds := sorted(there.keys() & here.keys()):
            means = [fmean(side[round][0] for round in rounds) for side in (there, here)]
            far = max(abs(there[round][0] - here[round][0]) for round in rounds)
            n = min(there[round][1] for round in rounds)
            band = _band(metric in {*FRACTIONS, own}, means[0], means[1], n)
            found.append(Apart(cell, name, means[0], means[1], far, band=band))
    missing += [f"the doubt '{metric}'{of}" for metric, _ in ours.keys() - theirs.keys() if metric.startswith(PREFIX)]
    return found, missing


def _band(fraction: bool, there: float, here: float, n: int) -> float:
    """How far another machine may be from a training number: of a class or a client few images make more."""
    if not fraction:
        return RELATIVE * max(abs(there), abs(here))
    middle = min(max((there + here) / 2, 0.0), 1.0)
    return max(TOLERANCE, 3 * math.sqrt(middle * (1 - middle) / n) if n else 0.0)


# --- all together ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """What all comparisons come to."""

    numbers: Sequence[Apart]
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
        return max((round(one.far, 12) for one in self.numbers if one.evaluated), default=0.0)


def overall(
    numbers: Sequence[Apart], unverified: Sequence[str], elsewhere: str | None, tolerance: float | None = None
) -> Agreement:
    """What comparisons come to. elsewhere: in what this machine is another than the file's; None: in nothing.

    tolerance: of accuracies, as whoever verifies asks; then nothing else counts. What the file says of its machine is
    not believed where training gave the same bits here: then nothing may differ.
    """
    if not numbers:
        return Agreement(numbers, unverified, 0.0, "nothing was compared", ["nothing was compared"])
    if tolerance is not None:
        wide = [one for one in numbers if one.evaluated and round(one.far, 12) > tolerance]
        return Agreement(numbers, unverified, tolerance, "--tolerance", [_said(one) for one in wide])
    trained = [one for one in numbers if _metric(one) == "train_loss"]
    if elsewhere is not None and trained and not any(one.far for one in trained):
        elsewhere, because = None, "training gave the same bits here"
    else:
        because = "same machine, torch and precision"
    if elsewhere is None:
        return Agreement(numbers, unverified, 0.0, because, [_said(one) for one in numbers if one.far])
    reasons = [*(_said(one) for one in numbers if one.beyond), *_together([one for one in numbers if one.evaluated])]
    return Agreement(numbers, unverified, TOLERANCE, elsewhere, reasons)


def _said(one: Apart) -> str:
    return f"{one.metric} of cell {one.cell} is {shown(one, one.theirs)} there and {shown(one, one.ours)} here"


def _both(one: Apart) -> str:
    return f"{shown(one, one.theirs)}, {shown(one, one.ours)}"


def _metric(one: Apart) -> str:
    return one.metric.partition(" ")[0].partition("[")[0]


def shown(one: Apart, value: float) -> str:
    """A number as people read it: accuracies in per cent."""
    return f"{100 * value:.2f} %" if one.evaluated or _metric(one) in FRACTIONS else f"{value:.6g}"


def _together(found: Sequence[Apart]) -> Iterable[str]:
    """What of all accuracies together is not chance, on another machine."""
    there, here, total = (sum(one.images[i] for one in found if one.images is not None) for i in range(3))
    changed = there + here
    if total and changed > round((1 - AGREEMENT) * total):
        yield f"only {100 * (1 - changed / total):.1f} % of all outcomes agree: {EXPECTED}"
    if changed and abs(there - here) > ONE_SIDED * changed and _one_sided(max(there, here), changed) < OF_OUTCOMES:
        yield f"of {changed} outcomes that changed {there} are right only there and {here} only here: {EXPECTED}"
    by_cell: dict[str, list[float]] = {}
    for one in found:
        by_cell.setdefault(one.cell, []).append(one.theirs - one.ours)
    means = [mean for mean in map(fmean, by_cell.values()) if mean]
    above = sum(mean > 0 for mean in means)
    if means and _one_sided(max(above, len(means) - above), len(means)) < LEVEL:
        side = "above" if above else "below"
        yield f"{max(above, len(means) - above)} of {len(means)} cells are {side} what they are here: {EXPECTED}"


def _one_sided(most: int, n: int) -> float:
    """p of a two-sided sign test in which the larger side has `most` of n."""
    return min(1.0, 2 * binomial_tail(most, n, 0.5))


def text(found: Agreement, notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """Whether the file agrees, why, and a block for each cell. notes: of a cell what else is to be said of it."""
    cells = list(dict.fromkeys(one.cell for one in found.numbers))
    word = "agrees" if found.agrees else "differs" if found.reasons else "not verified"
    lines = [
        f"{word}: {_count(found.numbers, 'number')} of {_count(cells, 'cell')}, accuracies at most"
        f" {100 * found.far:.2f} points apart{_same(found)} (tolerance {100 * found.tolerance:g}: {found.because})",
        *_first("differs", found.reasons),
        *_first("not verified", found.unverified),
    ]
    for cell in cells:
        mine = [one for one in found.numbers if one.cell == cell]
        rest = [one for one in mine if not one.evaluated]
        lines.append(f"cell {cell}: there, here{notes.get(cell, '')}")
        lines += [
            f"  {one.metric}: {_both(one)}, {100 * (one.agreement or 0):.1f} % of outcomes agree"
            for one in mine
            if one.evaluated
        ]
        lines.append(f"  {_count(rest, 'further number')}, {sum(not one.far for one in rest)} the same to the bit")
        lines += _first("", [f"{one.metric}: {_both(one)}" for one in rest if one.far])
    return "\n".join(lines)


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'s' * (len(things) != 1)}"


def _same(found: Agreement) -> str:
    """How many outcomes agree, in words; empty: there are none."""
    images = [one.images for one in found.numbers if one.images is not None]
    total = sum(one[2] for one in images)
    return f", {100 * (1 - sum(one[0] + one[1] for one in images) / total):.1f} % of outcomes agree" if total else ""


MOST = 8  # lines of a kind


def _first(what: str, said: Sequence[str]) -> list[str]:
    more = [f"  and {len(said) - MOST} more"] if len(said) > MOST else []
    return [*(f"  {what}{': ' if what else ''}{one}" for one in said[:MOST]), *more]
