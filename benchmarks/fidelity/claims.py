"""Which rows of suites say that they are somebody's release, and which comparisons carry them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from benchmarks.fidelity.measure import Row

MARKS = ("(released)", "(released weights)", "(FedTorch)")  # a label that ends in one of these is a claim
CLAIMS: dict[str, tuple[str, ...]] = {  # label of a suite -> ids of rows, or what they begin with and a dot
    "SFAT (released)": ("sfat.slack", "sfat.fedprox"),
    "SFAT (released weights)": ("sfat.slack",),
    "SCAFFOLD (released)": ("sfat.scaffold",),
    "Centralized (released)": ("sfat.centralized",),
    "FedSoftBetter (released weights)": ("fedsoftbetter",),
    "FGSM (released)": ("sfat.attack.cifar10.fgsm_sfat", "sfat.attack.svhn.fgsm_sfat"),
    "CalFAT (released)": ("calfat.client", "calfat.round"),
    "FedGATE (FedTorch)": ("fedtorch.fedgate",),
    "SCAFFOLD (FedTorch)": ("fedtorch.scaffold",),
}


def carried(label: str, rows: Iterable[Row]) -> list[Row]:
    """The comparisons behind a label; rows that are there to differ carry nothing."""
    wanted = CLAIMS[label]
    return [row for row in rows if row.expected and any(row.id == w or row.id.startswith(f"{w}.") for w in wanted)]


def outcomes(rows: Iterable[Row]) -> Mapping[str, bool | None]:
    """Per label whether all its comparisons pass; None where one of its claims has none."""
    kept = list(rows)
    found: dict[str, bool | None] = {}
    for label, wanted in CLAIMS.items():
        here = carried(label, kept)
        whole = all(any(row.id == w or row.id.startswith(f"{w}.") for row in here) for w in wanted)
        found[label] = all(row.passes for row in here) if whole else None
    return found
