"""What is said of a difference: its sentence, its conclusion, a block of `compare`, a line of a family, its record.

Every page, figure and format takes its words, its p and its rounding from here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tabulate import tabulate

from fatbench.report.contrasts import LEVEL, Difference, of_cells, quoted
from fatbench.report.numbers import statistics
from fatbench.report.numbers.shares import Shares
from fatbench.report.numbers.table_facts import attacked_in
from fatbench.store.selection import WORDS
from fatbench.suite.cells import Plan
from fatbench.suite.declared_contrasts import Tests
from fatbench.suite.standard_attacks import attack_name
from fatbench.suite.types import seeds_text

FLOOR = "no side is above the most frequent class, so nothing is said of how far apart they are"
OTHER_IMAGES = "these two trained networks on other such images"


# --- numbers -----------------------------------------------------------------------------------------------------


def signed(fraction: float) -> str:
    """A fraction as points with its sign, "+0.00" for none."""
    text = f"{100 * fraction:+.2f}"
    return text.replace("-", "+") if float(text) == 0 else text


def points_up(fraction: float, digits: int = 1) -> str:
    """A fraction as points, rounded up so that the printed size is truly found or excluded."""
    scale: int = 10**digits
    return f"{math.ceil(round(100 * scale * fraction, 9)) / scale:.{digits}f}"


def p_text(value: float) -> str:
    """Two digits that matter, "0.0047" or "0.20"; three beside 0.05; "1" and "< 1e-6" at the ends."""
    if value > 0.995 or value < 1e-6:
        return "1" if value > 0.5 else "< 1e-6"
    text = f"{value:#.2g}"
    return f"{value:.3g}" if text == "0.050" else text  # two would not say on which side of 0.05 it is


def p_equals(value: float | None) -> str:
    """ "p = 0.012", "p < 1e-6"; undefined where all differences are equal."""
    return "p undefined" if value is None else f"p {'' if value < 1e-6 else '= '}{p_text(value)}"


def seeds_count(count: int) -> str:
    """ "5 seeds"."""
    return f"{count} seed{'s' * (count != 1)}"


def too_few(seeds: int) -> list[str]:
    """A line saying that a claim needs more seeds; no line where there are enough."""
    minimum = statistics.SEEDS_FOR_A_CLAIM
    return [f"{seeds_count(seeds)}: a claim about methods needs at least {minimum}"] * (seeds < minimum)


def way_back(cell: str) -> str:
    """The command that computes a cell's numbers again, from what is stored of it alone, and compares."""
    return f"fatbench export {cell} -o {cell}.jsonl; fatbench verify {cell}.jsonl"


# --- one difference ----------------------------------------------------------------------------------------------


def sentence(one: Difference) -> str:
    """The conclusion in a sentence: "SFAT and FAT differ by at most 1.0 points under PGD-20 (95 %, 5 seeds)"."""
    attack, seeds, difference = attack_name(one.metric), len(one.seeds), one.difference or 0.0
    attack_text = "without an attack" if attack == "natural" else f"under {attack}"
    size, side = f"{abs(100 * difference):.1f}", "above" if difference > 0 else "below"
    label, other_label = one.sides if one.of_two else (one.name, "0")
    statement = f"{label} is {size} points {side} {other_label} {attack_text}"
    if one.test is None:
        return f"{statement} ({seeds_count(seeds)}: not tested)"
    if one.floor:
        none_better = f"{label} and {other_label} are no better than the most frequent class"
        return f"{none_better} {attack_text} ({seeds_count(seeds)})"
    interval = f"95 % interval {signed(one.test.low)} to {signed(one.test.high)}, {seeds_count(seeds)}"
    if seeds < statistics.SEEDS_FOR_A_CLAIM:
        equal = f"{label} and {other_label} differ by 0.0 points {attack_text}"
        return f"{equal if size == '0.0' else statement} ({interval}, too few for a claim)"
    if one.significant:
        return f"{statement} ({interval})"
    at_most = f"{points_up(one.test.at_most)} points"
    if not one.of_two:
        return f"{label} changes accuracy {attack_text} by at most {at_most} (95 %, {seeds_count(seeds)})"
    return f"{label} and {other_label} differ by at most {at_most} {attack_text} (95 %, {seeds_count(seeds)})"


def finding(one: Difference) -> str:
    """The sentence with the labels of the other axes: "multi-Krum: SFAT is ..."."""
    return f"{one.row}: {sentence(one)}" if one.row else sentence(one)


def conclusion(one: Difference) -> Iterable[str]:
    """The conclusion in lines: interval and p, the size not excluded, the difference that it can detect."""
    if one.test is None:
        yield from (f"=> not compared: {text}" for text in one.unlike)
        yield from [f"=> not tested: {one.why}"] * (not one.unlike)
        return
    yield f"over {one.over}: 95 % interval {signed(one.test.low)} to {signed(one.test.high)}, {p_equals(one.p)}"
    significant_text = f"significantly different (p < {LEVEL:g})"
    insignificant_text = f"not significantly different (p >= {LEVEL:g})"
    size = FLOOR if one.floor else f"they differ by at most {points_up(one.test.at_most, 2)} points (95 %)"
    yield f"=> {significant_text if one.significant else insignificant_text}; {size}"
    if one.equivalent:
        yield f"=> equivalent within ±{one.margin:g} points, the margin that the suite declares"
    if (size_found := one.detectable_alone) is not None:
        yield f"a true difference of {points_up(size_found)} points would be found with a power of about 0.8"


def record(one: Difference) -> dict[str, Any]:
    """A difference as plain data: fractions in [0, 1], unrounded."""
    test, over_seeds = one.test, one.over_seeds
    return {
        "contrast": one.name,
        "weights": [
            {"label": label, "metric": metric or one.metric, "weight": weight}
            for (label, metric), weight in one.weights.items()
        ],
        "row": one.row,
        "metric": one.metric,
        "n": one.n,
        "seeds": list(one.seeds),
        **{side: list(values) for side, values in zip("ab", one.values, strict=False)},
        "precisions": list(one.precisions),
        "estimator": one.estimator,
        "unit": one.unit or None,
        "not_compared": list(one.unlike),
        "not_tested": one.why or None,
        "difference": one.difference,
        "images": [
            {
                "seed": seed, "both": i.both, "only_a": i.only_a, "only_b": i.only_b, "agreement": i.agreement,
                "odds_ratio": i.odds_ratio, "mcnemar_p": i.p,
            }
            for seed, i in zip(one.seeds, one.images, strict=False)
        ],
        "over_seeds": over_seeds and {
            "mean": over_seeds.mean, "std": over_seeds.std, "interval": list(over_seeds.interval),
            "t_p": over_seeds.t_p, "wilcoxon_p": over_seeds.wilcoxon_p, "cohens_d": over_seeds.d,
        },
        "test": test and {
            "over": one.over, "mean": test.mean, "interval": [test.low, test.high], "p": test.p,
            "at_most": test.at_most, "detectable": one.detectable_alone, "detectable_corrected": one.detectable,
            "seed_variance": test.seed_variance, "image_variance": test.image_variance, "equivalent": one.equivalent,
        },
        "p": one.p,
        "p_holm": one.p_holm,
        "doubts": dict(zip("ab", map(list, one.doubts), strict=False)) if one.both else {},
        **({"inputs": [reason._asdict() for reason in one.reasons]} if one.reasons else {}),
    }  # fmt: skip


# --- differences that nothing declares ---------------------------------------------------------------------------


def exploratory(differences: Sequence[Difference], a: str, b: str, checkpoint: str) -> str:
    """Differences as text, a block for each that ends in its conclusion; a summary of several comes first.

    checkpoint: a key of `selection.WORDS`; empty: arrays, which have no rounds.
    """
    count, seeds = len(differences), {len(one.seeds) for one in differences}
    lines = [summary(differences)] if count > 1 else []
    of_round = f"checkpoint: {WORDS[checkpoint]}; " if checkpoint else ""
    lines += [f"A = {a}", f"B = {b}", f"{of_round}differences are A - B, in points"]
    lines.append(f"exploratory, not corrected for {count} comparison{'s' * (count > 1)}")
    lines += too_few(min(seeds)) if len(seeds) == 1 else []
    for one in differences:
        head, *block_lines = _block(one)
        seed_warning = too_few(len(one.seeds)) if len(seeds) > 1 else []
        lines += ["", head, *(f"  {line}" for line in (*seed_warning, *block_lines))]
    return "\n".join(lines) + "\n"


def summary(differences: Sequence[Difference]) -> str:
    """In how many comparisons the accuracies differ, and in how many of those tested significantly."""
    differing = sum(len(set(one.values)) > 1 for one in differences)
    p_values = [one.p for one in differences if one.p is not None]
    of_tested = f"significantly (p < {LEVEL:g}) in {sum(p < LEVEL for p in p_values)} of {len(p_values)} tested"
    differ = f"accuracies differ in {differing}, {of_tested if p_values else 'none is tested'}"
    return f"{len(differences)} comparisons: {differ}"


def _block(one: Difference) -> Iterable[str]:
    seeds = f"seed{'s' * (len(one.seeds) > 1)} {seeds_text(one.seeds)}{attacked_in(one.seeds, one.precisions)}"
    yield f"{one.row + ': ' if one.row else ''}{one.metric} ({one.n} images, {seeds})"
    means = [100 * sum(side) / len(side) for side in one.values]
    difference = "" if one.difference is None else f": difference {signed(one.difference)}"
    yield f"A {means[0]:.2f}, B {means[1]:.2f}{difference}"
    for doubt in dict.fromkeys(doubt for side in one.doubts for doubt in side):
        sides = [side for side, doubts in zip("AB", one.doubts, strict=True) if doubt in doubts]
        yield f"{' and '.join(sides)}: {doubt}"
    if (over_seeds := one.over_seeds) is not None:
        d = "" if over_seeds.d is None else f", Cohen's d {over_seeds.d:.2f}"
        t_test, wilcoxon = p_equals(over_seeds.t_p), p_equals(over_seeds.wilcoxon_p)
        yield f"over seeds, these images: paired t {t_test}, Wilcoxon {wilcoxon}{d}"
    for reason in one.reasons:
        yield f"A and B differ in what answered them: {reason.beside}"
    yield from conclusion(one)
    if one.images:
        yield f"{OTHER_IMAGES}, which says nothing about the methods:"
    for seed, i in zip(one.seeds, one.images, strict=False):
        odds = "" if i.odds_ratio is None else f", matched odds ratio {i.odds_ratio:.2f}"
        counts_text = f"only A right {i.only_a}, only B right {i.only_b}{odds}"
        test = "McNemar" if one.numbers[0][0].groups is None else "McNemar over groups (Obuchowski)"
        yield f"  seed {seed}: agreement {100 * i.agreement:.1f} %, {counts_text}; {test} {p_equals(i.p)}"


# --- the family that a suite declares ----------------------------------------------------------------------------


def family(
    declared: Sequence[Difference], tests: Tests, plan: Plan, checkpoint: str,
    cell_ids: Collection[str] | None = None, seeds: Collection[int] = (),
) -> str:  # fmt: skip
    """The family as text: the answer, a line for each comparison, then the columns and contrasts explained.

    cell_ids: ids of cells, see `contrasts.of_cells`. seeds: those of the preset; a test at fewer is said to be one.
    """
    size = len(declared)
    count = f"{size} comparison{'s' * (size != 1)}"
    title = f"suite {plan.suite}, preset {plan.preset}: family '{tests.family}'"
    if not declared:
        return f"{title} is of points of the grid that are not in this preset\n"
    if not (shown := of_cells(declared, cell_ids)):
        return f"{title}: none of its {count} matches the filter\n"
    significant = sum(one.significant for one in declared)
    texts = [_line(one) for one in shown]
    common = [name for name in ("over", "images", "seeds") if len(texts) > 1 and len({t[name] for t in texts}) == 1]
    columns = [name for name in texts[0] if name not in common and any(text[name] for text in texts)]
    headline = quoted(tests, declared)
    facts = [f"{name} {texts[0][name]}" for name in common if texts[0][name]]
    lines = [
        f"{significant or 'none'} of {count} significant after Holm's correction (p < {LEVEL:g})",
        f"{title}, as the suite declares it",
        *([finding(headline)] if headline is not None else []),
        *([f"{len(shown)} of them match the filter"] if len(shown) < size else []),
        *([tests.note] if tests.note else []),
        "",
        tabulate([[text[name] for name in columns] for text in texts], columns, "simple", disable_numparse=True),
        "",
        *([f"of all: {'; '.join(facts)}"] if facts else []),
        f"points with the 95 % interval; checkpoint: {WORDS[checkpoint]}; what cannot be tested counts with p = 1",
        f"found: a true difference of this size, with a power of about 0.8, at {LEVEL:g} / {size} (at {LEVEL:g})",
        *([f"--: {FLOOR}"] if any(one.floor for one in shown) else []),
    ]
    lines += [f"{name}: {_points(a, b)}" for name, (a, b) in tests.points.items()]
    formulas = {name: formula(contrast.weights) for name, contrast in tests.contrasts.items()}
    lines += [f"{name} = {text}" for name, text in formulas.items() if name != text]
    if tested := [one.seeds for one in declared if one.test is not None]:
        lines += (
            too_few(min(map(len, tested)))
            if tests.contrasts
            else [
                "pairs: McNemar's exact test, Newcombe's interval; a line: binomial test, Clopper-Pearson's interval",
                "clients are drawn at random, trained networks are not: nothing is said of other trainings",
            ]
        )
        if not all(set(seeds) <= set(used) for used in tested):
            why = "testing again as more arrive rejects too often"
            lines.append(f"not all {len(seeds)} seeds of the preset are tested: {why}")
    return "\n".join(lines) + "\n"


def _line(one: Difference) -> dict[str, str]:
    """The texts of a comparison, by column."""
    where = f"{one.row} ({', '.join(one.worst)})" if one.worst else one.row
    place = {"comparison": one.name, "where": where, "evaluated": one.metric}
    if one.test is None:
        columns = ("clients", "points", "at most", "p (Holm)", "found", "over", "images", "seeds", "not tested")
        return {**place, **dict.fromkeys(columns, ""), "p (Holm)": "1", "not tested": one.why}
    within = f", within ±{one.margin:g}" if one.equivalent else ""
    return {
        **place,
        "clients": one.test.counts if isinstance(one.test, Shares) else "",
        "points": f"{signed(one.test.mean)} ({signed(one.test.low)} to {signed(one.test.high)})",
        "at most": "--" if one.at_most is None else f"{points_up(one.at_most, 2)}{within}",
        "p (Holm)": p_text(one.p_corrected or 0.0),
        "found": f"{points_up(one.detectable)} ({points_up(one.detectable_alone or 0.0)})" if one.detectable else "--",
        "over": one.over,
        "images": f"{one.n or ''}",
        "seeds": seeds_text(one.seeds) + (attacked_in(one.seeds, one.precisions) if one.numbers else ""),
        "not tested": "",
    }


def _points(a: Mapping[str, Sequence[str]], b: Mapping[str, Sequence[str]] | float) -> str:
    """What is compared: "BN, 16, train - GN, eval", or "BN, 16, train against 5 %"."""
    labels = ", ".join(label for labels in a.values() for label in labels)
    if isinstance(b, float):
        return f"{labels} against {100 * b:g} %"
    return f"{labels} - {', '.join(label for axis, labels in b.items() if a.get(axis) != labels for label in labels)}"


def formula(weights: Mapping[tuple[str, str], float]) -> str:
    """A contrast as a formula: "0.5 SFAT + 0.5 SFAT (released) - 0.5 FAT - 0.5 FAT shrunk"."""
    terms = []
    for (label, metric), weight in sorted(weights.items(), key=lambda item: item[1] < 0):
        size = "" if abs(weight) == 1 else f"{abs(weight):.3g} "
        terms.append(f"{'-' if weight < 0 else '+'} {size}{label}{f' under {metric}' if metric else ''}")
    return " ".join(terms).removeprefix("+ ")
