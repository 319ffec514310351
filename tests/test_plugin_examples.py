"""The plug-ins of docs/examples: the contract check finds nothing, and each runs in a suite and does what it says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small import small

import fatbench
from fatbench import testing
from fatbench.engine.cohort import train_cohort
from fatbench.engine.local import trainable
from fatbench.engine.malicious import Malicious
from fatbench.engine.mixing import aggregate, mix
from fatbench.engine.rounds import Context
from fatbench.suite import plugins

FOLDER = Path(__file__).parent.parent / "docs" / "examples"
FILES = sorted(FOLDER.glob("*.py"))
LOCAL = "local: {batch: 16, lr: 0.05, objective: standard}"
ROWS = {
    "buffered": f"late: {{algorithm: {{name: buffered, rounds: 3, aggregator: uniform, {LOCAL}}}}}",
    "remembering": """lied to: {malicious: {clients: 1, attack: sign_flip}},
      remembers: {algorithm: {aggregator: remembering}},
      aimed at: {algorithm: {aggregator: remembering}, malicious: {clients: 1, attack: patient}}""",
}


def test_every_example_is_run() -> None:
    assert {file.stem for file in FILES} == ROWS.keys()


@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[pytest.mark.nightly] * (file.stem == "remembering"), id=file.stem) for file in FILES],
)
def test_the_contract_holds(file: Path, own_plugins: None) -> None:
    plugins.add(file, "")
    found = [*testing.check(file)]
    assert found and not [violations for *_, violations in found if violations]


@pytest.mark.parametrize("name", sorted(ROWS))
def test_it_runs_beside_federated_averaging(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_plugins: None, forks: None
) -> None:
    monkeypatch.chdir(tmp_path)
    text = small(
        plugins=f"[{FOLDER / f'{name}.py'}]", train="160", test="60", partition="{name: iid, clients: 4}", rounds=3,
        model="{name: vit, patch: 4, dim: 16, depth: 1, heads: 2}", axes=f"{{method: {{FedAvg: {{}}, {ROWS[name]}}}}}",
        tables="",
    )  # fmt: skip
    Path("mine.yaml").write_text(text)
    done = fatbench.run("mine.yaml", jobs=1, device="cpu", quiet=True)
    assert set(done["status"]) == {"done"}, done
    numbers = fatbench.results("mine.yaml", stage="train")
    value = {(row.method, row.metric, row.round): row.value for row in numbers[numbers.client < 0].itertuples()}
    CHECKS[name](value)


def of_buffered(value: dict[Any, float]) -> None:
    """Some uploads are older than their round, and some are under way at its end."""
    steps, under_way = ([value["late", metric, t] for t in (1, 2, 3)] for metric in ("server_steps", "under_way"))
    assert sum(steps) > 0 and max(under_way) > 0 and any(value["late", "staleness", t] for t in (1, 2, 3))


def of_remembering(value: dict[Any, float]) -> None:
    assert value["aimed at", "malicious", 3] == 1 and ("remembers", "malicious", 3) not in value


CHECKS = {"buffered": of_buffered, "remembering": of_remembering}


def test_the_adversary_aimed_at_it_moves_it_back_farther_than_one_that_is_not(own_plugins: None) -> None:
    plugins.add(FOLDER / "remembering.py", "")
    rule = testing.member("Aggregator", "remembering")
    on = testing.small_problem(clients=5, images_per_client=8)
    theta = testing.initial_state(on).model
    names = trainable(on.model)
    now = Context(0, 1, on, theta, {}, 0.05)

    def along(adversary: str) -> float:
        liar = replace(on, malicious=Malicious("1", testing.member("Adversary", adversary)))
        sent = train_cohort(liar, theta, [*range(5)], 0, testing.local(), aggregator=rule, context=now)
        new = mix(sent, aggregate(rule, sent, now), theta, on.model)
        honest = [u.model for u in sent if u.client != 1]
        mean = torch.cat([(torch.stack([m[n] for m in honest]).mean(0) - theta[n]).flatten() for n in names])
        return float(torch.cat([(new[n] - theta[n]).flatten() for n in names]) @ mean)

    assert along("patient") < along("sign_flip")
