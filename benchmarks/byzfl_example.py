"""`python -m benchmarks.byzfl_example`: ByzFL's own program at one point of the suite fat-maps, as JSON.

Its configuration is its default one (`byzfl.benchmark.benchmark.default_config`) but for the point, the network and the
number of steps. `theirs` has its logistic regression, whose loss is minus the sigmoid of an image's label, and its
normalisation of images; `ours` our linear network, cross-entropy and images in [0, 1]. Accuracies are on the test
images, after as many steps as `steps` says.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy
import torch
from torchvision import transforms

from fatbench.models.linear import linear

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what it needs warns as it is imported
    from byzfl.benchmark import benchmark, train
    from byzfl.fed_framework import models

ATTACKS = {
    "sign flip": "SignFlipping",
    "optimal IPM": "Optimal_InnerProductManipulation",
    "optimal ALIE": "Optimal_ALittleIsEnough",
}


def configuration(attack: str, network: dict[str, str], results: Path, point: argparse.Namespace) -> dict[str, Any]:
    """What its program makes of its default configuration for one training."""
    config = copy.deepcopy(benchmark.default_config)
    config["benchmark_config"] |= {"nb_steps": point.steps, "device": "cpu", "nb_training_seeds": 1, "f": [point.f]}
    config["benchmark_config"]["data_distribution"][0]["distribution_parameter"] = [point.similarity]
    config["model"] |= network
    config["aggregator"] = [a for a in config["aggregator"] if a["name"] == "TrMean"]
    config["attack"] = [a for a in config["attack"] if a["name"] == ATTACKS[attack]]
    config["evaluation_and_results"] |= {
        "evaluation_delta": point.every,
        "data_folder": str(point.data),
        "results_directory": str(results),
    }
    trainings = benchmark.generate_all_combinations(
        benchmark.ensure_optional_config_parameters(config), ["pre_aggregators", "milestones"]
    )
    trainings = benchmark.set_tolerated_f_equal_to_real_f(benchmark.ensure_key_parameters(trainings))
    (training,) = benchmark.compute_number_of_workers(benchmark.set_declared_as_aggregation_parameter(trainings))
    return dict(training)


@contextlib.contextmanager
def our_network() -> Iterator[None]:
    """Its program with our linear network and MNIST's images in [0, 1]; the loss is a setting."""
    known = train.dict_datasets["mnist"]
    train.dict_datasets["mnist"] = (known[0], transforms.ToTensor(), transforms.ToTensor())
    models.ours = functools.partial(linear, (1, 28, 28), 10)
    try:
        yield
    finally:
        train.dict_datasets["mnist"] = known


def accuracies(attack: str, point: argparse.Namespace, network: dict[str, str]) -> list[float]:
    """Its test accuracies, before the first step and after every `point.every`."""
    with tempfile.TemporaryDirectory() as folder:
        train.start_training(configuration(attack, network, Path(folder), point))
        (found,) = Path(folder).rglob("test_accuracy_*.txt")
        return numpy.loadtxt(found, delimiter=",").tolist()


NETWORKS: dict[str, tuple[Callable[[], contextlib.AbstractContextManager[None]], dict[str, str]]] = {
    "theirs": (contextlib.nullcontext, {"name": "logreg_mnist"}),
    "ours": (our_network, {"name": "ours", "loss": "CrossEntropyLoss"}),
}


def main() -> int:
    """Train both networks once against each adversary."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.byzfl_example", description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="with MNIST/raw in it")
    parser.add_argument("--similarity", type=float, default=0.33)
    parser.add_argument("-f", type=int, default=2, help="malicious clients beside ten honest ones")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between two evaluations")
    parser.add_argument("-o", "--output", type=Path, default=Path("results/bench/byzfl.json"), metavar="FILE")
    point = parser.parse_args()
    torch.set_num_threads(1)
    steps = [*range(0, point.steps, point.every), point.steps]
    found: dict[str, Any] = {
        "byzfl": version("byzfl"), "torch": torch.__version__.partition("+")[0],
        "f": point.f, "similarity": point.similarity, "steps": steps,
    }  # fmt: skip
    for name, (context, network) in NETWORKS.items():
        with context():
            found[name] = {attack: accuracies(attack, point, network) for attack in ATTACKS}
    point.output.write_text(json.dumps(found, indent=1) + os.linesep, encoding="utf-8")
    print(point.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
