"""The names under which a run stores what makes its numbers doubtful: "doubt_", and a code; the value says how much.

    doubt_diverged 4.0                         training diverged in round 4
    doubt_outputs_are_not_finite 12.0          of 12 images
    doubt_no_update_was_trusted_in_rounds 3.0  in 3 rounds

`fatbench.report.numbers.doubts` puts them into words.
"""

from __future__ import annotations

import re

PREFIX = "doubt_"
IN_ROUNDS = "_in_rounds"  # the end of a code whose value counts rounds
BEFORE = (  # names that older programs gave, and the code that each is
    (re.compile(r"flag_training_diverged_in_round_(?P<value>\d+),.*"), "diverged"),
    (re.compile(r"flag_training_ended_in_round_(?P<value>\d+),.*"), "ended"),
    (re.compile(r"flag_(?P<value>\d+)_uploads_were_not_finite_.*"), "uploads_refused"),
    (re.compile(r"flag_(?P<code>.+)_in_(?P<value>\d+)_rounds"), IN_ROUNDS),
    (re.compile(r"flag_(?P<code>.+)"), ""),
)


def name(words: str) -> str:
    """The name of the number that says so: "a b" is "doubt_a_b"."""
    return PREFIX + words.replace(" ", "_")


def translated(metric: str, value: float) -> tuple[str, float]:
    """A number's name and value as they are stored now; a sentence in the name of an older file is a code here."""
    if not metric.startswith("flag_"):
        return metric, value
    for pattern, code in BEFORE:
        if match := pattern.fullmatch(metric):
            groups = match.groupdict()
            return PREFIX + groups.get("code", "") + code, float(groups.get("value", 1)) * value
    return metric, value
