"""The text of a suite whose cells take a second on digits: a test gives the sections it is about, in a line of YAML."""

from __future__ import annotations

HEAD = {"name": "mine", "title": "Cells that take a second", "plugins": "", "seeds": ""}
BASE = {
    "data": "digits", "train": "60", "test": "20", "partition": "{name: iid, clients: 2}",
    "model": "{name: small_cnn, width: 2}",
}  # fmt: skip
TAIL = {
    "axes": "{method: {FedAvg: {}}}", "evaluate": "{attacks: {natural: natural}}", "presets": "{paper: {}}",
    "tables": "[{id: A, title: Mine, rows: [method], values: {Natural: natural}}]",
}  # fmt: skip


def small(more: str = "", *, rounds: int = 1, rule: str = "samples", local: str = "", **parts: str) -> str:
    """FedAvg on digits. parts: other sections; what is no section of a suite is one of its `base`; empty: left out."""
    local = f"{{{local or 'batch: 16, lr: 0.05, objective: standard'}}}"
    fedavg = f"{{name: fedavg, rounds: {rounds}, aggregator: {rule}, local: {local}}}"
    every = {**HEAD, **BASE, "algorithm": fedavg, **TAIL, **parts}

    def lines(keys: object, indent: str = "") -> str:
        return "".join(f"{indent}{key}: {every[key]}\n" for key in keys if every[key])

    return f"{lines(HEAD)}base:\n{lines((k for k in every if k not in HEAD | TAIL), '  ')}{lines(TAIL)}{more}"
