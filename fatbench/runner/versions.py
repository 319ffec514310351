"""Which work was done with other versions of the plug-ins than those that are loaded now.

Imports no torch, and no database before it is asked for.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fatbench.errors import FatbenchError, UnknownName
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins, signatures

if TYPE_CHECKING:
    from fatbench.runner.jobs import Job
    from fatbench.store.stages import Store

Changed = Mapping[str, Mapping[str, str]]  # cell -> stage -> what changed, in words


def changed(jobs: Sequence[Job], store: Store) -> Changed:
    """Stages that hold results of another version of their plug-ins, of all that the jobs ask for.

    A stage that was begun counts too: no run may continue it with other code. One that holds nothing does not.
    """
    if not signatures.plugins():
        return {}
    from sqlalchemy import select

    from fatbench.store.rows import fetch
    from fatbench.store.schema import RUNS, STAGES

    now = {job.cell: _now(job) for job in jobs}
    found: dict[str, dict[str, str]] = {}
    query = select(STAGES.c.cell, STAGES.c.stage, STAGES.c.status, STAGES.c.round, RUNS.c.extra).outerjoin(
        RUNS, RUNS.c.id == STAGES.c.run
    )
    with store.database.reading() as connection:
        for row in fetch(connection, query, STAGES.c.cell, now):
            expected = now[row.cell](row.stage)
            if expected is None or not (row.status == "done" or row.round):
                continue
            then = json.loads(row.extra or "{}").get("plugins", [])
            if not plugins.same_functions(then, expected):
                found.setdefault(row.cell, {})[row.stage] = _words(then, expected)
    return found


def _now(job: Job) -> Callable[[str], list[dict[str, Any]] | None]:
    """stage -> what it would use of plug-ins today; None: the job does not ask for this stage."""
    of_training = plugins.records(job.spec)
    by_attack = {one.id: plugins.of_evaluation(job.spec, one) for one in job.evaluations}
    return lambda stage: of_training if stage == "train" else by_attack.get(parsed(stage).evaluation)


def _words(then: Iterable[Mapping[str, Any]], now: Iterable[Mapping[str, Any]]) -> str:
    """ "mine.py (sha256 1a2b3c4d5e6f), now mine.py (sha256 6f5e4d3c2b1a)"; what is the same is left out."""
    was, is_ = ({plugins.describe(record) for record in records} for records in (then, now))
    before = ", ".join(sorted(was - is_)) or "a plug-in of unknown version"
    return f"{before}, now {', '.join(sorted(is_ - was)) or 'without it'}"


def lines(found: Changed) -> list[str]:
    """What to tell a person about work that was left as it is."""
    kept = "1 cell from an older version of a plug-in is kept as it is"
    if len(found) > 1:
        kept = f"{len(found)} cells from an older version of a plug-in are kept as they are"
    said = [f"{kept}: {', '.join(sorted(found)[:8])}"]
    said[0] += ", ..." * (len(found) > 8)
    said += [
        f"  computed with {what}" for what in dict.fromkeys(w for stages in found.values() for w in stages.values())
    ]
    return [
        *said,
        "  --rerun-changed computes them again and deletes the old numbers; to keep both, give the function a new name",
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
                f"{error}; runs in the database used the plug-in {plugins.describe(record)}:"
                f" give --plugin {record['plugin']}, or list it under 'plugins' in the suite"
            )
    return str(error)


def plugin_record(entry: str, store: Store) -> dict[str, Any] | None:
    """The newest record of a plug-in that defined "aggregator near_median" in a run of the database."""
    from sqlalchemy import select

    from fatbench.store.schema import RUNS

    query = select(RUNS.c.extra).where(RUNS.c.extra.contains(f'"{entry}"', autoescape=True)).order_by(RUNS.c.id.desc())
    with store.database.reading() as connection:
        for (extra,) in connection.execute(query):
            for record in json.loads(extra).get("plugins", []):
                if entry in record["names"]:
                    return dict(record)
    return None
