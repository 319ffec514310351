"""`python -m benchmarks.own_edge`: what an honest-but-curious server sees in the feature maps that FedVKD uploads.

Three clients of 200 images train for ten rounds; the server runs a fourth edge on 200 other images, from the same
start. It is told nothing else of the clients. Each attack tries to name the first 50 images of each client among 1,000,
from the features that the client uploads in rounds 1 and 10. About 150 seconds of one core. Writes own-edge.json, which
results/fedvkd.md quotes: how many images of each client were named.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure import provenance
from fatbench.data import DATASETS
from fatbench.engine import randomness
from fatbench.engine.local import LocalTraining
from fatbench.engine.optimizers import ServerTraining
from fatbench.engine.rounds import Problem, Round, State, Tensors
from fatbench.methods.algorithms.fedvkd import fedvkd
from fatbench.methods.inversions import image_measures
from fatbench.methods.inversions.decoder import feature_inversion
from fatbench.methods.objectives import standard
from fatbench.models import MODELS
from fatbench.settings import data_folder

CLIENTS, IMAGES, TARGETS, CANDIDATES, ROUNDS, STEPS = 3, 200, 50, 1000, (1, 10), 200
LOCAL = LocalTraining(batch=20, lr=0.001, objective=standard, epochs=2, optimizer="adam")
SERVER = ServerTraining(epochs=2, lr=0.0005, batch=50, optimizer="adamw", weight_decay=0.05)


def component(features: Tensor) -> Tensor:
    """The first principal component of feature maps (n, c, h, w) over all positions: (n, 3, h, w), up to its sign.

    It needs no weights at all.
    """
    vectors = features.permute(0, 2, 3, 1)
    centred = vectors.flatten(0, 2).double()
    centred = centred - centred.mean(0)
    direction = torch.linalg.eigh(centred.T @ centred)[1][:, -1]
    along = (vectors @ direction.float()).unsqueeze(1)
    return (0.5 + 0.2 * (along - along.mean()) / along.std()).expand(-1, 3, -1, -1)


def named(problem: Problem, result: Round, start: Tensors, public: Tensor) -> dict[str, list[int]]:
    """{attack: how many of its first images it names, for each client}. The server's own edge is the last client."""
    gallery, clients = problem.images[:CANDIDATES].float() / 255, range(len(problem.shards) - 1)
    features = [next(u for u in result.updates if u.client == k).extra["features"][:TARGETS].float() for k in clients]

    def hits(k: int, *reconstructions: Tensor) -> int:
        truth = problem.shards[k][:TARGETS]
        return int(torch.stack([image_measures.identified(r, gallery, truth) for r in reconstructions]).any(0).sum())

    found = {"component": [hits(k, component(features[k]), 1 - component(features[k])) for k in clients]}
    for name, edge in (("initial", start), ("own edge", result.own[len(clients)])):
        problem.model.load_state_dict({**start, **edge})
        extractor = problem.model.get_submodule("extractor")
        draws = torch.Generator().manual_seed(1)
        decoded = feature_inversion(extractor, public, torch.cat(features), draws, steps=STEPS, width=24)
        found[name] = [hits(k, decoded[k * TARGETS : (k + 1) * TARGETS]) for k in clients]
    return found


def measure(images: Tensor, labels: Tensor) -> dict[str, Any]:
    """The hits of each attack by round, on the first 4,000 images of a data set (N, C, H, W) uint8, (N,) int64."""
    with randomness.forked(0, "model"):
        model = MODELS["edge_vit"](tuple(images.shape[1:]), 10, width=8, dim=64, depth=3, heads=4, patch=4)
    shards = [torch.arange(k * IMAGES, (k + 1) * IMAGES) for k in (*range(CLIENTS), 10)]
    problem = Problem(model, images, labels, shards, 10, 0, torch.device("cpu"))
    start = {name: value.clone() for name, value in model.state_dict().items()}
    rounds = {}
    for result in fedvkd(problem, State(0, start), rounds=ROUNDS[-1], local=LOCAL, server=SERVER):
        if result.index + 1 in ROUNDS:
            rounds[str(result.index + 1)] = named(problem, result, start, images[3000:4000].float() / 255)
    return {"rounds": rounds, "targets": TARGETS, "candidates": CANDIDATES}


def main() -> None:
    """Measure on one core and write the file."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.own_edge", description=__doc__.splitlines()[0])
    parser.add_argument("--variant", default="jpeg75", help="of CIFAR-10 in the data folder (default: %(default)s)")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/bench"), metavar="FOLDER")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dataset = DATASETS["cifar10"](data_folder(), variant=chosen.variant)
    images, labels = torch.from_numpy(dataset.train_images[:4000]), torch.from_numpy(dataset.train_labels[:4000])
    made = {**measure(images, labels), "data": dataset.fingerprint, "where": provenance(torch.device("cpu"))}
    (chosen.output / "own-edge.json").write_text(json.dumps(made, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(json.dumps(made["rounds"]))


if __name__ == "__main__":
    main()
