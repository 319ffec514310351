"""`make gpu-piece` without a GPU: what it restores, how large what it writes back is, and its exit codes."""

from __future__ import annotations

from benchmarks import piece
from fatbench.suite import files

PLAN = files.load(piece.SUITE).plan(piece.PRESET)


def test_the_preset_is_the_pair_of_table_9_through_jpeg() -> None:
    """As printed: one local epoch, 100 rounds, weight decay 1e-4, all images; not printed: lr 0.01, the release's."""
    assert [cell.key for cell in PLAN.cells] == [
        {"dataset": "CIFAR-10", "E": "1", "method": method} for method in ("FAT", "SFAT")
    ]
    assert PLAN.checkpoints == ["last", "best-test"]
    for cell in PLAN.cells:
        local = cell.spec["algorithm"]["local"]
        assert (local["epochs"], local["lr"], float(local["weight_decay"])) == (1, 0.01, 1e-4)
        assert (cell.spec["algorithm"]["rounds"], cell.spec["validation"], cell.spec["seed"]) == (100, 0, 6)
        assert cell.spec["data"]["variant"] == "jpeg75" and cell.spec["model"]["name"] == "nin"
        assert "autoattack" not in {one.label for one in cell.evaluations}
