"""Find stored results whose inputs have changed since: data, models, weights or plug-ins.

It compares stored digests, and those of files. It loads neither data sets nor networks, and does not import torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sqlalchemy import select

from fatbench.errors import FatbenchError, UnknownName
from fatbench.runner.jobs import Job
from fatbench.store import inputs
from fatbench.store.inputs import FOLLOWS, Inputs, Reason, last_models, stored_inputs
from fatbench.store.rows import fetch
from fatbench.store.schema import RUNS, STAGES
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins
from fatbench.suite.facts import data_keys

if TYPE_CHECKING:
    from fatbench.store.stages import Store

Changed = Mapping[str, Mapping[str, Sequence[Reason]]]  # cell -> stage -> the inputs that have changed


def changed(jobs: Sequence[Job], store: Store, fingerprints: Mapping[str, str] | None = None) -> Changed:
    """Find the stages of jobs whose results were computed with other inputs than today's.

    Unfinished stages with some results count too: no run may continue them. A cell that begins with the model of a
    changed cell, or computes attacks on it, has changed itself. An evaluation of a model that its own cell has trained
    anew does not count as changed, but as still to do (`transfer.of_former_model`).

    fingerprints: those of data sets that were just read, by `data_keys`; None for those that the newest run saw.
    """
    known_data = store.seen_data() if fingerprints is None else {**store.seen_data(), **fingerprints}
    job_cells = {job.cell for job in jobs}
    # a filter may have left out cells whose models attacks are computed on
    origins = {
        item.origin.cell: item.origin.spec for job in jobs for item in job.evaluations if item.origin is not None
    }
    left_out = [cell for cell, spec in origins.items() if cell and spec and cell not in job_cells]
    all_jobs = [*jobs, *(Job(cell, origins[cell], [], [], "", "") for cell in left_out)]
    answered = stored_inputs(store.database, [job.cell for job in all_jobs])
    rows = store.stages([job.cell for job in all_jobs])
    known: dict[tuple[str, str], tuple[Mapping[str, str], Mapping[str, Any]]] = {}  # what is known of a stage today
    jobs_by_cell = {job.cell: job for job in all_jobs}
    for (cell, stage), row in rows.items():
        job, evaluation = jobs_by_cell[cell], parsed(stage).evaluation
        used = [item for item in job.evaluations if item.id == evaluation]
        is_asked = stage == "train" or bool(used)
        if is_asked and (cell, stage) in answered and (row.status == "done" or row.round):
            earlier = answered[cell, stage]
            of_plugins = plugins.now(earlier["functions"], earlier["read"], plugins.used(job.spec, used))
            known[cell, stage] = inputs.of_data(data_keys(job.spec), known_data), of_plugins
    models = last_models(store.database, answered.values())
    result: dict[str, dict[str, Sequence[Reason]]] = {}
    for (cell, stage), reasons in inputs.changed(answered, known, models).items():
        if cell in job_cells:
            result.setdefault(cell, {})[stage] = reasons
    return result


def code_changed(store: Store, cell: str, stage: str, made_by: Mapping[str, Any]) -> bool:
    """Whether an unfinished stage was begun by a fatbench with uncommitted changes other than today's.

    A change of the commit is allowed and shown beside the numbers. Uncommitted code could never be found again.
    """
    row = store.stages([cell]).get((cell, stage))
    if row is None or row.run is None or row.status == "done" or not row.round:
        return False
    earlier = Inputs(code=stored_inputs(store.database, [cell])[cell, stage]["code"])
    current = Inputs(code=Inputs.of_run(made_by)["code"])
    committed = all("+" not in code for side in (earlier, current) for code in side["code"].values())
    return not committed and bool(earlier.differ(current))


def only_follows(stages: Mapping[str, Sequence[Reason]]) -> bool:
    """Whether a cell has changed only because it uses the model of a changed cell, which is not trained again yet."""
    return bool(stages) and all(reason.now == FOLLOWS for reasons in stages.values() for reason in reasons)


def ignored_options(
    cells: Sequence[str], store: Store, precision: str | None, path: str, attack_precision: str | None = None
) -> list[str]:
    """Lines that tell the user that finished stages have another precision or path than the one asked for.

    precision, attack_precision: None if not asked for. path: "auto" if not named.
    """
    asked_options = {"precision": precision, "path": None if path == "auto" else path}
    asked_options["attack precision"] = attack_precision
    query = select(STAGES.c.cell, STAGES.c.stage, RUNS.c.precision, RUNS.c.extra).join(RUNS, RUNS.c.id == STAGES.c.run)
    cells_by_option: dict[tuple[str, str], set[str]] = {}
    with store.database.reading() as connection:
        for row in fetch(connection, query, STAGES.c.cell, cells):
            if row.stage == "train":
                used_options = {"precision": row.precision, "path": json.loads(row.extra).get("path")}
            else:
                used_options = {"attack precision": parsed(row.stage).precision}
            for name, value in used_options.items():
                if asked_options[name] is not None and value not in (None, asked_options[name]):
                    cells_by_option.setdefault((name, value), set()).add(row.cell)
    return [
        f"{len(ids)} finished cell{'s' * (len(ids) != 1)} with {name} {value} {'are' if len(ids) != 1 else 'is'} kept:"
        f" {name} {asked_options[name]} is for what is still to do"
        for (name, value), ids in cells_by_option.items()
    ]


def as_dicts(stages: Mapping[str, Sequence[Reason]]) -> list[dict[str, str]]:
    """One cell's reasons as dictionaries, each once."""
    reasons = dict.fromkeys(reason for reasons in stages.values() for reason in reasons)
    return [{**reason._asdict(), "words": reason.words} for reason in reasons]


def words(changes: Changed) -> list[str]:
    """The reasons of several cells in words, each once."""
    reasons = (reason for stages in changes.values() for stage_reasons in stages.values() for reason in stage_reasons)
    return list(dict.fromkeys(reason.words for reason in reasons))


def lines(changes: Changed) -> list[str]:
    """Lines that tell the user which cells have changed inputs and were left alone."""
    cells = sorted(changes)
    one_cell = "1 cell was computed with other inputs than today's and is kept as it is"
    many_cells = f"{len(cells)} cells were computed with other inputs than today's and are kept as they are"
    first_line = f"{one_cell if len(cells) == 1 else many_cells}: {', '.join(cells[:8])}{', ...' * (len(cells) > 8)}"
    return [
        first_line,
        *(f"  computed with {text}" for text in words(changes)),
        "  --rerun changed computes them again and deletes the old numbers; to keep both, give the function or the"
        " data set a new name",
    ]


def explain(error: FatbenchError, db: str | None = None, option: str = "--plugin ") -> FatbenchError:
    """The error; for an unknown name its message has the plug-in that defined it in earlier runs, too.

    option: how that plug-in is given: in Python "plugins=".
    """
    if not isinstance(error, UnknownName):
        return error
    from fatbench.store.opening import opened

    with contextlib.suppress(FatbenchError), opened(db) as store:
        record = None if store is None else plugin_record(error.entry, store)
        if record is not None:
            error.args = (
                f"{error.args[0]}; runs in the database used the plug-in {inputs.describe(record)}:"
                f" give {option}{record['plugin']}, or list it under 'plugins' in the suite",
            )
    return error


def plugin_record(entry: str, store: Store) -> dict[str, Any] | None:
    """The newest record of the plug-in that defined an entry, "aggregator near_median", in a run of the database."""
    query = select(RUNS.c.extra).where(RUNS.c.extra.contains(f'"{entry}"', autoescape=True)).order_by(RUNS.c.id.desc())
    with store.database.reading() as connection:
        for (extra,) in connection.execute(query):
            for record in json.loads(extra).get("plugins", []):
                if entry in record["names"]:
                    return dict(record)
    return None
