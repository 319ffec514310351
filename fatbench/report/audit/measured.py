"""Stored results as the long table of printed numbers, so that our own are asked the same questions."""

from __future__ import annotations

import math
import re
from typing import Any

import pandas

from fatbench.report.audit.read_tables import LONG, UNPRINTED, Known, Long, completed, head_of
from fatbench.report.numbers.long import COLUMNS


def is_measured(frame: pandas.DataFrame) -> bool:
    """Whether a frame has stored results: of `fatbench.results`, or a CSV file or Parquet of `fatbench export`."""
    return {"cell", "metric", "value", "n", "attack"} <= {*map(str, frame.columns)}


def of_results(frame: pandas.DataFrame, known: Known) -> Long:
    """The accuracies of a frame as `fatbench.results` gives them: means over seeds, of the last round of each cell."""
    numbers = frame[(frame["n"] > 0) & (frame["client"] < 0) & (frame["outcomes"] > 0)]
    numbers = numbers[numbers["round"] == numbers.groupby(["cell", "metric"])["round"].transform("max")]
    axes = [str(column) for column in frame if column not in COLUMNS]
    keys = [*axes] or ["cell"]
    texts = {key: numbers[key].fillna("").astype(str) for key in keys}
    numbers = numbers.assign(**texts, attack=numbers["attack"].fillna(""))
    name = next((axis for axis in ("method", "aggregator", "algorithm", *reversed(axes)) if axis in axes), "cell")
    rows: list[dict[str, Any]] = []
    cells: Any = numbers.groupby(["suite", "metric", "attack", *keys], sort=False)
    for (suite, metric, attack, *labels), group in cells:
        said, values = dict(zip(keys, labels, strict=True)), 100 * group.drop_duplicates("cell")["value"]
        head = head_of(metric)
        eps = re.search(r"\beps=([^,)]+)", attack)
        rows.append({
            "paper": known.paper or "fatbench", "table": suite, "dataset": said.pop("dataset", known.dataset),
            "method": said.pop(name), "setting": ", ".join(filter(None, said.values())), "role": "",
            "attack": head.attack or metric, "steps": head.steps, "radius": eps[1] if eps else UNPRINTED,
            "value": values.mean(), "decimals": 6, "deviation": values.std() if len(values) > 1 else math.nan,
            "runs": len(values), "n": group["n"].min(), "classes": math.nan, "head": metric, "place": len(rows) + 1,
        })  # fmt: skip
    return Long(completed(pandas.DataFrame(rows, columns=LONG), known))
