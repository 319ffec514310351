"""Results as RobustBench's records: model_info/DATASET/THREAT/NAME.json, a file for each network under AutoAttack.

What only the authors of a network know is empty: link, authors, venue. Accuracies are text, in per cent, as there.
RobustBench's own programs read them; they have boards of BOARDS alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import NothingMatched
from fatbench.report.pairs import label, measured_numbers
from fatbench.suite.cells import Plan
from fatbench.suite.weights import CELL

if TYPE_CHECKING:
    from fatbench.store.stages import Store


BOARDS = ("cifar10", "cifar100", "imagenet")


def records(plan: Plan, store: Store) -> dict[Path, dict[str, Any]]:
    """File -> record, of the plan's networks after the last round. NothingMatched: none is under AutoAttack.

    "clean_acc" and "autoattack_acc" are on the images that both took; "n_examples" says how many, and a record of fewer
    than the test set's is "unreliable".
    """
    cells = {cell.id: cell for cell in plan.unique()}
    record_by_file: dict[Path, dict[str, Any]] = {}
    for id, numbers in measured_numbers(store, cells, "last").items():
        by_label = {label(name): number for name, number in numbers.items()}
        cell = cells[id]
        attack = next((number.attack for number in cell.evaluations if number.label == "autoattack"), None)
        clean, robust = by_label.get("natural"), by_label.get("autoattack")
        if attack is None or clean is None or robust is None:
            continue
        data = cell.spec["data"]
        n = min(clean.n, robust.n)  # both accuracies on the images that both took
        accuracies_of_first = (
            _accuracy_of_first(number.value, number.outcomes, number.n, n) for number in (clean, robust)
        )
        accuracies = [f"{100 * value:.2f}" for value in accuracies_of_first]
        weights = cell.spec["model"].get("weights")
        has_additional_data = cell.spec.get("auxiliary") or (weights and not weights.startswith(CELL))
        row_name = ", ".join([*cell.key.values(), f"seed {cell.spec['seed']}"])
        dataset = CATALOGUE.get(data["name"])
        # as in model_info/ of RobustBench
        file = Path(data["name"], attack.get("norm", "Linf"), f"{plan.suite}-{id}.json")
        record_by_file[file] = {
            "link": "",
            "name": f"{plan.suite}, {plan.preset}: {row_name}",
            "authors": "",
            "additional_data": bool(has_additional_data),
            "number_forward_passes": 1,
            "dataset": data["name"],
            "venue": "Unpublished",
            "architecture": cell.spec["model"]["name"],
            "eps": str(attack["eps"]),
            "clean_acc": accuracies[0],
            "reported": "",
            "autoattack_acc": accuracies[1],
            "n_examples": n,
            "unreliable": bool(data.get("variant")) or dataset is None or n < (dataset.test or n + 1),
        }
    if not record_by_file:
        raise NothingMatched(
            f"'{plan.suite}' has no network that AutoAttack took: fatbench run ... --attacks autoattack"
        )
    return record_by_file


def _accuracy_of_first(value: float, outcomes: tuple[int, int] | None, n: int, limit: int) -> float:
    """The accuracy on the first `limit` of n images; on all images where no outcomes are stored."""
    from fatbench.report.numbers.long import first_outcomes

    if outcomes is None or limit == n:
        return value
    bits, total = first_outcomes(outcomes, n, limit)
    return bits.bit_count() / total


def write(plan: Plan, store: Store, folder: Path) -> list[Path]:
    """Write the records into a folder and return their files, relative to it.

    NothingMatched: as for `records`. MachineError: the disk is full.
    """
    from fatbench import whole_file

    files = []
    for file, record in records(plan, store).items():
        text = json.dumps(record, indent=2) + "\n"
        whole_file.write(folder / file, text, f"-o {folder}", make_folder=True)
        files.append(file)
    return files
