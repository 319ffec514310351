"""The metrics by which a run stores doubts about its numbers: "doubt_" and a code; the value says how much.

    doubt_diverged 4.0                         training diverged in round 4
    doubt_outputs_are_not_finite 12.0          of 12 images
    doubt_no_update_was_trusted_in_rounds 3.0  in 3 rounds

`fatbench.report.numbers.doubts` puts them into words.
"""

from __future__ import annotations

import re

PREFIX = "doubt_"
IN_ROUNDS = "_in_rounds"  # the suffix of a code whose value counts rounds
BEFORE = (  # (name given by an older version, its code)
    (re.compile(r"flag_training_diverged_in_round_(?P<value>\d+),.*"), "diverged"),
    (re.compile(r"flag_training_ended_in_round_(?P<value>\d+),.*"), "ended"),
    (re.compile(r"flag_(?P<value>\d+)_uploads_were_not_finite_.*"), "uploads_refused"),
    (re.compile(r"flag_(?P<code>.+)_in_(?P<value>\d+)_rounds"), IN_ROUNDS),
    (re.compile(r"flag_(?P<code>.+)"), ""),
)


def name(words: str) -> str:
    """The metric of a doubt: "doubt_a_b" for "a b"."""
    return PREFIX + words.replace(" ", "_")


def current_form(metric: str, value: float) -> tuple[str, float]:
    """A metric and its value in today's form: older files have a sentence as the name."""
    if not metric.startswith("flag_"):
        return metric, value
    for pattern, code in BEFORE:
        if match := pattern.fullmatch(metric):
            groups = match.groupdict()
            return PREFIX + groups.get("code", "") + code, float(groups.get("value", 1)) * value
    return metric, value
