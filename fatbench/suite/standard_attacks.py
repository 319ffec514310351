"""The field's standard attacks by name: their headings, their order and their settings at a radius."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fatbench.errors import SpecError, did_you_mean
from fatbench.suite.types import FRACTION, number_of

TITLES = {"fgsm": "FGSM", "pgd20": "PGD-20", "cw": "CW", "autoattack": "AA"}  # metric -> heading of a table
DEFAULT_RADIUS = "8/255"  # for a suite without a radius
DEFAULT = ("natural", *TITLES)  # from the weakest


def heading(metric: str) -> str:
    """The heading of a metric in a table: "PGD-20" of "pgd20", "AA" of "autoattack"; others as they are."""
    if match := re.fullmatch(r"pgd(\d+)", metric):
        return f"PGD-{match[1]}"
    return TITLES.get(metric, metric)


def attack_name(metric: str) -> str:
    """The same in a sentence, where AutoAttack has its whole name."""
    return "AutoAttack" if metric in ("autoattack", "aa") else heading(metric)


def did_you_mean_metric(name: str, metrics: Iterable[str]) -> str:
    """As `errors.did_you_mean`; a heading, such as "AA" or "pgd-20", means its metric."""
    metrics = list(metrics)
    meant_metrics = [metric for metric in metrics if name.lower() in (heading(metric).lower(), metric.lower())]
    return did_you_mean(meant_metrics[0] if meant_metrics else name, metrics)


def headings(metrics: Iterable[str]) -> dict[str, str]:
    """Heading of a table -> metric: "PGD-20" of "pgd20", "AA" of "autoattack"; two alike keep their metrics' names."""
    heading_by_metric = {metric: heading(metric) for metric in metrics}
    used = list(heading_by_metric.values())
    return {text if used.count(text) == 1 else metric: metric for metric, text in heading_by_metric.items()}


def strength(metric: str) -> int:
    """The rank of a metric: natural, the field's attacks from weak to strong, then all others."""
    return DEFAULT.index(metric) if metric in DEFAULT else len(DEFAULT)


def settings(eps: str | float) -> dict[str, dict[str, Any]]:
    """name -> settings of each attack at a radius such as "8/255" or 0.1; pgd20 and cw take steps of eps / 4.

    SpecError for a radius outside the pixel range.
    """
    try:
        radius = float(number_of(eps))
    except (TypeError, ValueError):
        radius = -1.0
    if not 0 <= radius <= 1:
        raise SpecError(
            f"expected a part of the pixel range such as 8/255 or 0.03 (and not 8), got '{eps}'", option="eps"
        )
    step: Any = radius / 4
    eps_value: Any = radius
    # a fraction stays text, so that tables print 8/255
    if isinstance(eps, str) and (match := FRACTION.match(eps)):
        eps_value, step = eps.strip(), f"{float(match[1]) / 4:g}/{match[2]}"
    return {
        "natural": {"name": "natural"},
        "fgsm": {"name": "fgsm", "eps": eps_value},
        "pgd20": {"name": "pgd", "eps": eps_value, "step": step, "steps": 20},
        "cw": {"name": "cw", "eps": eps_value, "step": step, "steps": 30},
        "autoattack": {"name": "autoattack", "eps": eps_value},
    }


def demand_known(added_labels: Sequence[str], suite_labels: Collection[str]) -> None:
    """SpecError for a name of `--attack` that is neither in TITLES nor a label of the suite."""
    for label in added_labels:
        if label not in TITLES and label not in suite_labels:
            hint = did_you_mean_metric(label, [*TITLES, *suite_labels])
            raise SpecError(f"no attack is named '{label}'{hint}", option="attack")
