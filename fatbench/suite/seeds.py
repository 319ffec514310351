"""Seeds as text: "0-4" and "6,7", as `--seeds` and suite files take them, and as tables and messages say them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fatbench.errors import SpecError

SEEDS = 100_000  # the most of a list


def parse_seeds(text: str) -> list[int]:
    """The seeds of a text such as "0-4", "6,7" or "3"; SpecError for any other text."""
    seeds: list[int] = []
    for range_text in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?\s*", range_text)
        if not match or (match[2] and int(match[2]) < int(match[1])):
            raise SpecError(f"expected seeds such as 0-4 or 6,7, got '{text[:60]}'", option="seeds")
        seed_range = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(seeds) + len(seed_range) > SEEDS:
            raise SpecError(f"more than {SEEDS} seeds: '{text[:60]}'", option="seeds")
        seeds += seed_range
    return list(dict.fromkeys(seeds))


def seeds_text(seeds: Iterable[int]) -> str:
    """The seeds in order, more than ten in a row as a range: "0, 1, 2", "10-39, 41"."""
    texts: list[str] = []
    rest = sorted(seeds)
    while rest:
        length = next((n for n, seed in enumerate(rest) if seed != rest[0] + n), len(rest))
        texts += [f"{rest[0]}-{rest[length - 1]}"] if length > 10 else map(str, rest[:length])
        rest = rest[length:]
    return ", ".join(texts)
