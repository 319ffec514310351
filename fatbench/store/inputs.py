"""What answered a number beside its question, and whether two numbers were answered by the same.

A cell's identity is the question. Its runs say what answered it; `differ` compares two answers, and whoever reuses,
resumes, pairs or imports a number asks it. What either side lacks is unknown and counts as equal.

| input | what it is | where a run has it |
|---|---|---|
| data | SHA-256 of the images and labels, of each data set | `extra.data`, `extra.auxiliary` |
| weights | digest of the weights that the training began with | `extra.weights` |
| model | SHA-256 of the file of the model that was attacked | the record of the stage |
| origin | that of the model on which a transferred attack was computed | the record of the stage |
| functions | what was reached of plug-ins | `extra.plugins` |
| read | files, modules and variables that a plug-in or a network of a file has read | `extra.read` |
| answers | logits of a network that was not trained here | `extra.answers` |
| code | commit, and SHA-256 of what is not committed | columns, `extra.diff` |
| asked | precision and path | columns, `extra.path` |

`code` and `asked` are said and decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import select

from fatbench.store import replicates
from fatbench.store.database import Database, patient
from fatbench.store.rows import fetch
from fatbench.store.schema import CELLS, RUNS, STAGES
from fatbench.store.stage_names import parsed

Inputs = Mapping[str, Any]  # input -> {what it is of: digest}; functions: a list of records of plug-ins
Record = Mapping[str, Any]  # of a plug-in, see `fatbench.suite.plugins.records`

DECIDE = ("data", "weights", "model", "origin", "functions", "read", "answers")
ASKED = ("precision", "path")
DATA_SETS = {"data": "", "auxiliary": "auxiliary"}  # setting of a cell that names a data set -> what it is of
WORDS = {
    "data": "other {} images or labels",
    "weights": "other initial weights of {}",
    "model": "another model",
    "origin": "another attacking model of {}",
    "read": "another {}",
    "answers": "a network that answers differently",
    "code": "another code of fatbench",
    "asked": "another {}",
}


class Reason(NamedTuple):
    """In what two answers differ."""

    code: str  # an input
    subject: str  # of which data set, cell, file; empty: there is only one
    then: str
    now: str

    @property
    def decides(self) -> bool:
        """Whether the number may not be reused; else it is only said."""
        return self.code in DECIDE

    @property
    def words(self) -> str:
        """ "other images or labels [1a2b3c4d], now [5e6f7a8b]"."""
        if self.code == "functions":
            return f"{self.then}, now {self.now}"
        difference = " ".join(WORDS[self.code].format(self.subject).split())
        return f"{difference} [{shortened(self.then)}], now [{shortened(self.now)}]"

    @property
    def beside(self) -> str:
        """The same of two sides of which none is older: "other images or labels [1a2b3c4d] and [5e6f7a8b]"."""
        return self.words.replace(", now ", " and ")


def shortened(digest: str) -> str:
    """The first eight characters of a digest, without the name of its algorithm; other texts as they are."""
    bare = digest.rpartition(":")[2]
    return bare[:8] if len(bare) >= 32 else bare or "none"


def of_run(run: Mapping[str, Any], record: Mapping[str, Any] | None = None, origin: str = "") -> dict[str, Any]:
    """What answered a stage, as its run states it.

    run: a row of `runs`, the rest of its provenance beside its columns. record: of the stage. origin: what its settings
    say of whose model the attack was computed on, "cell 0a1b2c3d4e5f".
    """
    record = record or {}
    weights = run.get("weights")
    inputs: dict[str, Any] = {
        "data": {subject: data_record["fingerprint"] for subject, data_record in _data_sets(run)},
        "weights": _digest_by_subject(_began_with(weights), weights.get("digest")) if weights else {},
        "model": _digest_by_subject("", record.get("model")),
        "origin": _digest_by_subject(origin, record.get("origin")),
        "functions": run.get("plugins") or [],
        "read": run.get("read") or {},
        "code": _digest_by_subject("", _code(run)),
        "asked": {name: run[name] for name in ASKED if run.get(name)},
    }
    return inputs | ({"answers": run["answers"]} if "answers" in run else {})


@patient
def stored_inputs(database: Database, cells: Iterable[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """(cell, stage) -> what answered it, of the stages of some cells that a run holds."""
    columns = (*(STAGES.c[name] for name in ("cell", "stage", "record", "settings")),
               *(RUNS.c[name] for name in ("commit", "dirty", "precision", "extra")))  # fmt: skip
    parse = cache(json.loads)
    result = {}
    with database.reading() as connection:
        query = select(*columns).join(RUNS, RUNS.c.id == STAGES.c.run)
        for cell, stage, record, settings, commit, dirty, precision, extra in fetch(
            connection, query, STAGES.c.cell, cells
        ):
            run = {**parse(extra), "commit": commit, "dirty": dirty, "precision": precision}
            origin = parse(settings).get("origin", "") if settings else ""
            result[cell, stage] = of_run(run, parse(record), str(origin or ""))
    return result


@patient
def mixtures(database: Database, data_keys: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> list[str]:
    """What stands in a database, or a file of results, under one name and was answered by several things, in words.

    data_keys: of a cell's spec, setting -> a text that two cells share which read the same of the same data set.
    A function of a plug-in in two versions; a data set with two fingerprints; evaluations of two models of one round.
    """
    with database.reading() as connection:
        specs = {row.id: json.loads(row.spec) for row in connection.execute(select(CELLS.c.id, CELLS.c.spec))}
    users: dict[tuple[str, str], dict[str, str]] = {}  # (what, name) -> digest -> a cell that has it
    for (cell, stage), inputs in sorted(stored_inputs(database, list(specs)).items()):
        for record in inputs["functions"]:
            for name in record.get("names", ()):
                digest = record.get("reached", {}).get(name, _record_key(record))
                users.setdefault(("versions of", name), {}).setdefault(digest, f"{describe(record)} in cell {cell}")
        for setting, text in data_keys(specs[cell]).items():
            if digest := inputs["data"].get(DATA_SETS[setting]):
                key = ("versions of the data", text)
                users.setdefault(key, {}).setdefault(digest, f"[{shortened(digest)}] in cell {cell}")
        if digest := inputs["model"].get(""):
            key = ("models in", f"round {parsed(stage).round} of cell {cell}")
            users.setdefault(key, {}).setdefault(digest, f"[{shortened(digest)}] in {stage}")
    return [
        f"{len(cells_by_digest)} {kind} {name}: {', '.join(cells_by_digest.values())}"
        for (kind, name), cells_by_digest in users.items()
        if len(cells_by_digest) > 1
    ]


def of_replicates(database: Database, cells: Iterable[str] | None = None) -> dict[str, list[Reason]]:
    """Replicate -> in what its answer differs from that of its cell; only those that differ, of all cells or these."""
    ids_by_cell = replicates.of(database, cells)
    answered = stored_inputs(database, [id for ids in ids_by_cell.values() for id in ids])
    by_cell: dict[str, dict[str, dict[str, Any]]] = {}
    for (cell, stage), inputs in answered.items():
        by_cell.setdefault(cell, {})[stage] = inputs
    result: dict[str, list[Reason]] = {}
    for original, *replicate_ids in ids_by_cell.values():
        for id in replicate_ids:
            cell_inputs, replicate_inputs = by_cell.get(original, {}), by_cell.get(id, {})
            # two trainings have two models, and attacks on them other origins: that is what a repetition is
            reasons = (
                inputs
                for stage in cell_inputs.keys() & replicate_inputs.keys()
                for inputs in differ(cell_inputs[stage], replicate_inputs[stage])
            )
            decisive = dict.fromkeys(
                inputs for inputs in reasons if inputs.decides and inputs.code not in ("model", "origin")
            )
            if decisive:
                result[id] = list(decisive)
    return result


def _began_with(weights: Mapping[str, Any]) -> str:
    return f"cell {weights['cell']}" if weights.get("cell") else str(weights.get("source") or "")


def _data_sets(run: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, str]]]:
    for setting, subject in DATA_SETS.items():
        data_record = run.get(setting)
        if isinstance(data_record, Mapping) and data_record.get("fingerprint"):
            yield subject, data_record


def _digest_by_subject(subject: Any, digest: Any) -> dict[str, str]:
    return {str(subject or ""): str(digest)} if digest else {}


def _code(run: Mapping[str, Any]) -> str:
    """ "<commit>", with "+<SHA-256 of the difference>" where some of it is not committed; empty: not known."""
    if not run.get("commit") or (run.get("dirty") and not run.get("diff")):
        return ""
    return f"{run['commit']}+{run['diff']}" if run.get("dirty") else str(run["commit"])


def differ_beside(a: Inputs, b: Inputs, same_cell: bool) -> list[Reason]:
    """In what two numbers that are set beside each other differ, beyond what they are to differ in.

    same_cell: they answer one question; else their models, weights and functions are two methods', but a function that
    both use is to be one. Other images or labels cannot be paired.
    """
    reasons = [reason for reason in differ(a, b) if reason.decides]
    if same_cell:
        return reasons
    decisive = [reason for reason in reasons if reason.code in ("data", "read")]
    of_both = [*(a.get("functions") or ()), *(b.get("functions") or ())]
    if versions_differ(of_both):
        decisive.append(Reason("functions", "", *_versions(a["functions"], b["functions"])))
    return decisive


def differ(earlier: Inputs, current: Inputs) -> list[Reason]:
    """In what two answers differ, those that decide first; empty: in nothing that both sides know."""
    reasons = []
    for code in (*DECIDE, "code", "asked"):
        earlier_value, current_value = earlier.get(code), current.get(code)
        if earlier_value is None or current_value is None:
            continue
        if code == "functions":
            if not same_functions(earlier_value, current_value):
                reasons.append(Reason(code, "", *_versions(earlier_value, current_value)))
        elif code == "answers":
            from fatbench.store.answers import same_answers

            if not same_answers(earlier_value, current_value):
                reasons.append(Reason(code, "", "then", "otherwise"))
        else:
            for subject in sorted(earlier_value.keys() & current_value.keys()):
                if earlier_value[subject] != current_value[subject]:
                    reasons.append(Reason(code, subject, str(earlier_value[subject]), str(current_value[subject])))
    return reasons


# --- plug-ins ----------------------------------------------------------------------------------------------------


def describe(record: Record) -> str:
    """ "mine.py (sha256 1a2b3c4d5e6f; helper.py 6f5e4d3c2b1a)"."""
    modules = "".join(f"; {path} {digest[:12]}" for path, digest in record.get("modules", {}).items())
    return f"{record['plugin']} (sha256 {record['sha256'][:12]}{modules})"


def same_functions(earlier: Iterable[Record], current: Iterable[Record]) -> bool:
    """Whether two lists of records are of the same functions, wherever the files are and whatever else is in them."""
    earlier, current = list(earlier), list(current)
    if {_record_key(record) for record in earlier} == {_record_key(record) for record in current}:
        return True
    return all("reached" in record for record in (*earlier, *current)) and _reached(earlier) == _reached(current)


def versions_differ(records: Iterable[Record]) -> bool:
    """Whether records are of different versions of some function: one that any two of them name."""
    digests: dict[str, set[str]] = {}
    for record in records:
        for name in record.get("names", ()):
            digests.setdefault(name, set()).add(record.get("reached", {}).get(name, _record_key(record)))
    return any(len(versions) > 1 for versions in digests.values())


def _reached(records: Iterable[Record]) -> dict[str, str]:
    return {name: digest for record in records for name, digest in record["reached"].items()}


def _record_key(record: Record) -> str:
    return json.dumps([record.get("sha256"), record.get("modules", {})], sort_keys=True)


def _versions(earlier: Sequence[Record], current: Sequence[Record]) -> tuple[str, str]:
    """Both sides in words; what is the same is left out."""
    earlier_names, current_names = ({describe(record) for record in records} for records in (earlier, current))
    return (
        ", ".join(sorted(earlier_names - current_names)) or "a plug-in of unknown version",
        ", ".join(sorted(current_names - earlier_names)) or "without it",
    )
