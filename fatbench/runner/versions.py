"""Which work was answered by something else than what stands today: other data, models, weights or plug-ins.

Compares what is stored with what is stored, and files by their digests: loads neither a data set nor a network, and
imports no torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from fatbench.errors import FatbenchError, UnknownName
from fatbench.runner import reading, transfer
from fatbench.runner.jobs import Job
from fatbench.store import inputs
from fatbench.store.inputs import Reason
from fatbench.store.rows import fetch
from fatbench.store.schema import RUNS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins, weights
from fatbench.suite.first_images import data_keys

if TYPE_CHECKING:
    from fatbench.store.stages import Store
    from fatbench.suite.cells import Evaluation

FOLLOWS = "changed"  # of a model that is to be trained again
Changed = Mapping[str, Mapping[str, Sequence[Reason]]]  # cell -> stage -> in what its answer differs


def changed(jobs: Sequence[Job], store: Store, seen: Mapping[str, str] | None = None) -> Changed:
    """Stages that hold results which other inputs have answered than those of now, of all that the jobs ask for.

    A stage that was begun counts too: no run may continue it. One that holds nothing does not. A cell that begins with
    the model of a changed cell, or attacks with it, is changed itself. An evaluation of a model that its own cell has
    trained anew is no such stage, but one that is still to do (`transfer.of_former_model`). seen: fingerprints by
    `data_keys`, of data sets that were just read; None: those that the newest run saw.
    """
    known = store.seen_data() if seen is None else {**store.seen_data(), **seen}
    origins = {one.cell for job in jobs for one in _origins(job) if one.cell}
    origins |= {cell for job in jobs if (cell := weights.trained_by(job.spec)) is not None}
    rows = store.stages(sorted({*(job.cell for job in jobs), *origins}))
    by_cell: dict[str, dict[str, Any]] = {}
    for (cell, stage), row in rows.items():
        by_cell.setdefault(cell, {})[stage] = row
    # the cells whose models attacks are computed on may be no jobs: a filter can leave them out
    asked = [*jobs, *_others(jobs, rows)]
    answered = inputs.stored(store.database, [job.cell for job in asked])
    result: dict[str, dict[str, Sequence[Reason]]] = {}
    for job in asked:
        now = _Now(job, by_cell, known)
        for stage, row in by_cell.get(job.cell, {}).items():
            if row.run is None or not (row.status == "done" or row.round):
                continue
            current = now.of(stage)
            if current is None:
                continue
            then = answered[job.cell, stage]
            current["read"] = reading.today(then["read"], now.files(stage))
            reasons = [one for one in inputs.differ(then, current) if one.decides]
            if reasons:
                result.setdefault(job.cell, {})[stage] = reasons
    _carry_on(asked, by_cell, result)
    wanted = {job.cell for job in jobs}
    return {cell: stages for cell, stages in result.items() if cell in wanted}


def _carry_on(jobs: Sequence[Job], rows: Mapping[str, Mapping[str, Any]], result: dict[str, Any]) -> None:
    """Add to `result` what began with the model of a changed cell, or was attacked with it, and what follows that."""
    growing = True
    while growing:
        growing = False
        for job in jobs:
            for code, cell, stages in _followed(job, rows.get(job.cell, {})):
                if "train" not in result.get(cell, {}):
                    continue
                for stage in stages:
                    if stage not in result.get(job.cell, {}):
                        one = Reason(code, f"cell {cell}", "as it was", FOLLOWS)
                        result.setdefault(job.cell, {})[stage] = [one]
                        growing = True


def _followed(job: Job, rows: Mapping[str, Any]) -> Iterator[tuple[str, str, list[str]]]:
    """(input, cell, stages of the job that hold something made with that cell's model)."""
    held = [stage for stage, row in rows.items() if row.status == "done" or row.round]
    if (cell := weights.trained_by(job.spec)) is not None and "train" in held:
        yield "weights", cell, ["train"]
    for one in _origins(job):
        if one.cell:
            yield "origin", one.cell, [stage for stage in held if _origin_cell(job, stage) == one.cell]


def _origins(job: Job) -> Iterator[Any]:
    return (one.origin for one in job.evaluations if one.origin is not None)


def _origin_cell(job: Job, stage: str) -> str:
    """The cell on whose model an evaluation's attack is computed; empty: the model that is attacked, or a client's."""
    evaluation = parsed(stage).evaluation
    one = next((one for one in job.evaluations if one.id == evaluation), None)
    return one.origin.cell if one is not None and one.origin is not None else ""


def _others(jobs: Sequence[Job], rows: Mapping[tuple[str, str], Any]) -> list[Job]:
    """The cells, as jobs without evaluations, that attack for a job and are none themselves."""
    own = {job.cell for job in jobs}
    return [
        Job(one.cell, one.spec, [], [], "", "")
        for one in {one.cell: one for job in jobs for one in _origins(job)}.values()
        if one.cell and one.cell not in own and one.spec and (one.cell, "train") in rows
    ]


class _Now:
    """What would answer the stages of a job today, as far as that is known without loading anything."""

    def __init__(self, job: Job, rows: Mapping[str, Mapping[str, Any]], seen: Mapping[str, str]) -> None:
        self.job = job
        self.rows = rows
        self.evaluations: dict[str, Evaluation] = {one.id: one for one in job.evaluations}
        keys = data_keys(job.spec)
        self.data = {inputs.DATA_SETS[name]: seen[key] for name, key in keys.items() if key in seen}
        self.training = plugins.records(job.spec)

    def of(self, stage: str) -> dict[str, Any] | None:
        """The inputs of a stage; None: the job does not ask for it."""
        if stage == "train":
            return {"data": self.data, "functions": self.training, "weights": self._weights()}
        evaluation = self.evaluations.get(parsed(stage).evaluation)
        if evaluation is None:
            return None
        origin = evaluation.origin
        return {
            "data": self.data,
            "functions": plugins.of_evaluation(self.job.spec, evaluation),
            "origin": self._digest(origin.cell) if origin is not None and origin.cell else {},
        }

    def files(self, stage: str) -> frozenset[Path]:
        """The plug-ins that a stage uses."""
        return plugins.files(self.job.spec, [] if stage == "train" else [self.evaluations[parsed(stage).evaluation]])

    def _weights(self) -> dict[str, str]:
        cell = weights.trained_by(self.job.spec)
        return {} if cell is None else {name: f"sha256:{digest}" for name, digest in self._digest(cell).items()}

    def _digest(self, cell: str) -> dict[str, str]:
        """That of the last model of another cell."""
        there = transfer.last_model(cell, self.rows.get(cell, {}).get("train"))
        return {} if there is None or there.digest is None else {f"cell {cell}": there.digest}


def code_changed(store: Store, cell: str, stage: str, made_by: Mapping[str, Any]) -> bool:
    """Whether a stage that was begun was begun by a fatbench whose uncommitted changes are not those of now.

    Another commit is said beside the numbers; what is not committed has no name by which anybody could find it again.
    """
    row = store.stages([cell]).get((cell, stage))
    if row is None or row.run is None or row.status == "done" or not row.round:
        return False
    then = inputs.stored(store.database, [cell])[cell, stage]["code"]
    now = inputs.of_run(made_by)["code"]
    committed = all("+" not in code for code in (*then.values(), *now.values()))
    return not committed and bool(inputs.differ({"code": then}, {"code": now}))


def only_follows(stages: Mapping[str, Sequence[Reason]]) -> bool:
    """Whether a cell is changed only because one is whose model it uses, and that is not trained again yet."""
    return bool(stages) and all(reason.now == FOLLOWS for reasons in stages.values() for reason in reasons)


def asked_in_vain(
    cells: Sequence[str], store: Store, precision: str | None, path: str, attack_precision: str | None = None
) -> list[str]:
    """What to tell a person whose precision or path is not that of finished stages, which are kept as they are.

    precision, attack_precision: None where they were not asked for. path: "auto" where it was not named.
    """
    asked = {
        "precision": precision,
        "path": None if path == "auto" else path,
        "attack-precision": attack_precision,
    }
    query = select(STAGES.c.cell, STAGES.c.stage, RUNS.c.precision, RUNS.c.extra).join(RUNS, RUNS.c.id == STAGES.c.run)
    others: dict[tuple[str, str], set[str]] = {}
    with store.database.reading() as connection:
        for row in fetch(connection, query, STAGES.c.cell, cells):
            if row.stage == "train":
                used = {"precision": row.precision, "path": json.loads(row.extra).get("path")}
            else:
                used = {"attack-precision": parsed(row.stage).precision}
            for name, value in used.items():
                if asked[name] is not None and value not in (None, asked[name]):
                    others.setdefault((name, value), set()).add(row.cell)
    return [
        f"{len(ids)} finished cell{'s' * (len(ids) != 1)} with {name} {value} {'are' if len(ids) != 1 else 'is'} kept:"
        f" --{name} {asked[name]} is for what is still to do"
        for (name, value), ids in others.items()
    ]


def plain(stages: Mapping[str, Sequence[Reason]]) -> list[dict[str, str]]:
    """The reasons of one cell as plain data, each once."""
    reasons = dict.fromkeys(reason for reasons in stages.values() for reason in reasons)
    return [{**reason._asdict(), "words": reason.words} for reason in reasons]


def words(found: Changed) -> list[str]:
    """The reasons of some cells in words, each once."""
    reasons = (reason for stages in found.values() for each in stages.values() for reason in each)
    return list(dict.fromkeys(reason.words for reason in reasons))


def lines(found: Changed) -> list[str]:
    """What to tell a person about work that was left as it is."""
    cells = sorted(found)
    of_one = "1 cell was computed with other inputs than those of now and is kept as it is"
    of_many = f"{len(cells)} cells were computed with other inputs than those of now and are kept as they are"
    first = f"{of_one if len(cells) == 1 else of_many}: {', '.join(cells[:8])}{', ...' * (len(cells) > 8)}"
    return [
        first,
        *(f"  computed with {text}" for text in words(found)),
        "  --rerun-changed computes them again and deletes the old numbers; to keep both, give the function or the"
        " data set a new name",
    ]


def explain(error: FatbenchError, db: str | None = None) -> str:
    """The message of an error; of an unknown name with the plug-in that defined it in runs of the database."""
    if not isinstance(error, UnknownName):
        return str(error)
    from fatbench.store.opening import opened

    with contextlib.suppress(FatbenchError), opened(db) as store:
        record = None if store is None else plugin_record(error.entry, store)
        if record is not None:
            return (
                f"{error}; runs in the database used the plug-in {inputs.describe(record)}:"
                f" give --plugin {record['plugin']}, or list it under 'plugins' in the suite"
            )
    return str(error)


def plugin_record(entry: str, store: Store) -> dict[str, Any] | None:
    """The newest record of a plug-in that defined "aggregator near_median" in a run of the database."""
    query = select(RUNS.c.extra).where(RUNS.c.extra.contains(f'"{entry}"', autoescape=True)).order_by(RUNS.c.id.desc())
    with store.database.reading() as connection:
        for (extra,) in connection.execute(query):
            for record in json.loads(extra).get("plugins", []):
                if entry in record["names"]:
                    return dict(record)
    return None
