"""Which inputs produced a number, besides its cell's settings, and whether two numbers have the same inputs.

A cell's identity covers its settings. Its runs record the other inputs, `Inputs.of_run`. `now` gives those of today;
`differ` compares two whenever a number is reused, resumed, paired or imported. What either side lacks is unknown and
counts as equal.

| input | what it is | where a run records it |
|---|---|---|
| data | SHA-256 of the images and labels, of each data set | `extra.data`, `extra.auxiliary` |
| weights | digest of the weights that the training began with | `extra.weights` |
| model | SHA-256 of the file of the model that was attacked | the record of the stage |
| origin | SHA-256 of the model on which a transferred attack was computed | the record of the stage |
| functions | the plug-ins' functions that are used | `extra.plugins` |
| read | files, modules, packages and declared variables that a plug-in has read | `extra.read` |
| answers | logits of a network that was trained elsewhere | `extra.answers` |
| code | commit, and SHA-256 of what is not committed | columns, `extra.diff` |
| asked | precision and path | columns, `extra.path` |

`code` and `asked` are reported, but decide nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import select

from fatbench.store import replicates
from fatbench.store.database import Database, patient
from fatbench.store.fingerprints import same_answers
from fatbench.store.rows import fetch
from fatbench.store.schema import CELLS, RUNS, STAGES
from fatbench.store.stage_names import parsed

Stage = tuple[str, str]  # (cell, stage)
Record = Mapping[str, Any]  # of a plug-in, from `fatbench.suite.plugins.records`

FOLLOWS = "changed"  # the state of a model that will be trained again
DECIDE = ("data", "weights", "model", "origin", "functions", "read", "answers")
ASKED = ("precision", "path")
DATA_SETS = {"data": "", "auxiliary": "auxiliary"}  # {setting of a cell that names a data set: subject}
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
    """An input in which two numbers differ."""

    code: str  # an input
    subject: str  # which data set, cell or file; empty if there is only one
    then: str
    now: str

    @property
    def decides(self) -> bool:
        """Whether the number must not be reused; otherwise the difference is only reported."""
        return self.code in DECIDE

    @property
    def words(self) -> str:
        """ "other images or labels [1a2b3c4d], now [5e6f7a8b]"."""
        if self.code == "functions":
            return f"{self.then}, now {self.now}"
        difference = " ".join(WORDS[self.code].format(self.subject).split())
        return f"{difference} [{short_digest(self.then)}], now [{short_digest(self.now)}]"

    @property
    def beside(self) -> str:
        """The same for two sides of which neither is older: "other images or labels [1a2b3c4d] and [5e6f7a8b]"."""
        return self.words.replace(", now ", " and ")


def short_digest(digest: str) -> str:
    """The first eight characters of a digest, without its algorithm; any other text unchanged."""
    bare = digest.rpartition(":")[2]
    return bare[:8] if len(bare) >= 32 else bare or "none"


class Inputs(dict[str, Any]):
    """{input: {subject: digest}}; under "functions", a list of plug-ins' records; None for what is unknown."""

    @classmethod
    def of_run(cls, run: Mapping[str, Any], record: Mapping[str, Any] | None = None, origin: str = "") -> Inputs:
        """The inputs of a stage, as its run records them.

        run: a row of `runs`, with the rest of its provenance beside its columns. record: of the stage. origin: whose
        model the attack was computed on, by the stage's settings, such as "cell 0a1b2c3d4e5f".
        """
        record, weights = record or {}, run.get("weights") or {}
        source = f"cell {weights['cell']}" if weights.get("cell") else str(weights.get("source") or "")
        data = {subject: run.get(setting) for setting, subject in DATA_SETS.items()}
        return cls(
            data={subject: d["fingerprint"] for subject, d in data.items() if d and d.get("fingerprint")},
            weights=_digest_by_subject(source, str(weights.get("digest") or "").removeprefix("sha256:")),
            model=_digest_by_subject("", record.get("model")),
            origin=_digest_by_subject(origin, record.get("origin")),
            functions=run.get("plugins") or [],
            read=run.get("read") or {},
            answers=run.get("answers"),
            code=_digest_by_subject("", _code_version(run)),
            asked={name: run[name] for name in ASKED if run.get(name)},
        )

    def now(self, data: Mapping[str, str], models: Mapping[str, str], plugins: Mapping[str, Any]) -> Inputs:
        """The same inputs today, as far as they are known.

        data: fingerprints by subject. models: from `last_models`. plugins: from `fatbench.suite.plugins.now`.
        """
        today = {code: {s: models[s] for s in self[code] if s in models} for code in ("weights", "origin")}
        return Inputs(plugins, data=data, **today)

    def differ(self, current: Inputs) -> list[Reason]:
        """The known inputs in which a number differs from a later one, the deciding ones first."""
        reasons = []
        for code in (*DECIDE, "code", "asked"):
            earlier_value, current_value = self.get(code), current.get(code)
            if earlier_value is None or current_value is None:
                continue
            if code == "functions":
                if not same_functions(earlier_value, current_value):
                    reasons.append(Reason(code, "", *_versions(earlier_value, current_value)))
            elif code == "answers":
                if not same_answers(earlier_value, current_value):
                    reasons.append(Reason(code, "", "then", "otherwise"))
            else:
                for subject in sorted(earlier_value.keys() & current_value.keys()):
                    if earlier_value[subject] != current_value[subject]:
                        reasons.append(Reason(code, subject, str(earlier_value[subject]), str(current_value[subject])))
        return reasons

    def decisive(self, current: Inputs) -> list[Reason]:
        """The inputs in which they differ so that the number must not be reused."""
        return [reason for reason in self.differ(current) if reason.decides]

    def differ_in_comparison(self, other: Inputs, same_cell: bool) -> list[Reason]:
        """The inputs in which two compared numbers differ, beyond the intended difference.

        same_cell: they are of the same cell. Otherwise their models, weights and functions may differ, but a function
        that both use must have one version, and numbers on different images or labels cannot be paired.
        """
        reasons = self.decisive(other)
        if same_cell:
            return reasons
        reasons = [reason for reason in reasons if reason.code in ("data", "read")]
        own, others = self.get("functions") or (), other.get("functions") or ()
        if versions_differ([*own, *others]):
            reasons.append(Reason("functions", "", *_versions(own, others)))
        return reasons


@patient
def stored_inputs(database: Database, cells: Iterable[str]) -> dict[tuple[str, str], Inputs]:
    """{(cell, stage): its inputs} of the stages of some cells that have a run."""
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
            result[cell, stage] = Inputs.of_run(run, parse(record), str(origin or ""))
    return result


@patient
def last_models(database: Database, inputs: Iterable[Inputs]) -> dict[str, str]:
    """ "cell ID" -> SHA-256 of its last model, of the trained cells whose models stages began with or attacked with."""
    subjects = {subject for stage in inputs for subject in (*stage["origin"], *stage["weights"])}
    columns = (STAGES.c.cell, STAGES.c.round, STAGES.c.record)
    query = select(*columns).where(STAGES.c.stage == "train", STAGES.c.status == "done")
    models = {}
    with database.reading() as connection:
        cells = [subject.removeprefix("cell ") for subject in subjects]
        for cell, round, text in fetch(connection, query, STAGES.c.cell, cells):
            record = json.loads(text)
            last = record.get("last", {}).get("round", round)
            if digest := record.get("sha256", {}).get(f"model-{int(last):06d}.safetensors"):
                models[f"cell {cell}"] = digest
    return models


def changed(
    answered: Mapping[Stage, Inputs], today: Mapping[Stage, tuple[Any, Any]], models: Mapping[str, str]
) -> dict[Stage, list[Reason]]:
    """The inputs of stages that are others today, where something of today is known: (data, plugins) for `Inputs.now`.

    A cell that begins with the model of a changed cell, or computes attacks on it, has changed itself.
    """
    found: dict[Stage, list[Reason]] = {}
    while True:
        models = {**models, **{f"cell {cell}": FOLLOWS for cell, stage in found if stage == "train"}}
        now = {stage: answered[stage].now(data, models, plugins) for stage, (data, plugins) in today.items()}
        before, found = found, {stage: reasons for stage in today if (reasons := answered[stage].decisive(now[stage]))}
        if before.keys() == found.keys():
            return found


@patient
def find_mixtures(database: Database, data_keys: Callable[[Mapping[str, Any]], Mapping[str, str]]) -> list[str]:
    """Inputs of a database or results file that exist in several versions under one name, in words.

    These are a plug-in's function in two versions, a data set with two fingerprints, and evaluations of two models of
    the same round. data_keys: from a cell's spec, {setting: a text that is equal for cells which read the same data}.
    """
    with database.reading() as connection:
        specs = {row.id: json.loads(row.spec) for row in connection.execute(select(CELLS.c.id, CELLS.c.spec))}
    users: dict[tuple[str, str], dict[str, str]] = {}  # {(kind, name): {digest: a cell that has it}}
    versions = Versions()
    for (cell, stage), inputs in sorted(stored_inputs(database, list(specs)).items()):
        for record in inputs["functions"]:
            for name in record.get("names", ()):
                version = str(versions.number(name, record))
                users.setdefault(("versions of", name), {}).setdefault(version, f"{describe(record)} in cell {cell}")
        for setting, text in data_keys(specs[cell]).items():
            if digest := inputs["data"].get(DATA_SETS[setting]):
                key = ("versions of the data", text)
                users.setdefault(key, {}).setdefault(digest, f"[{short_digest(digest)}] in cell {cell}")
        if digest := inputs["model"].get(""):
            key = ("models in", f"round {parsed(stage).round} of cell {cell}")
            users.setdefault(key, {}).setdefault(digest, f"[{short_digest(digest)}] in {stage}")
    return [
        f"{len(cells_by_digest)} {kind} {name}: {', '.join(cells_by_digest.values())}"
        for (kind, name), cells_by_digest in users.items()
        if len(cells_by_digest) > 1
    ]


def differing_replicates(database: Database, cells: Iterable[str] | None = None) -> dict[str, list[Reason]]:
    """{replicate: the inputs in which it differs from its cell}, of all cells or of the given ones."""
    ids_by_cell = replicates.by_cell(database, cells)
    answered = stored_inputs(database, [id for ids in ids_by_cell.values() for id in ids])
    by_cell: dict[str, dict[str, Inputs]] = {}
    for (cell, stage), inputs in answered.items():
        by_cell.setdefault(cell, {})[stage] = inputs
    result: dict[str, list[Reason]] = {}
    for original, *replicate_ids in ids_by_cell.values():
        for id in replicate_ids:
            cell_inputs, replicate_inputs = by_cell.get(original, {}), by_cell.get(id, {})
            # models and origins always differ between two trainings, so they do not count
            shared = cell_inputs.keys() & replicate_inputs.keys()
            reasons = (one for stage in shared for one in cell_inputs[stage].decisive(replicate_inputs[stage]))
            decisive = dict.fromkeys(reason for reason in reasons if reason.code not in ("model", "origin"))
            if decisive:
                result[id] = list(decisive)
    return result


def of_data(keys: Mapping[str, str], fingerprints: Mapping[str, str]) -> dict[str, str]:
    """The fingerprints of a cell's data sets by subject. keys: {setting: key of the data set in `fingerprints`}."""
    return {DATA_SETS[setting]: fingerprints[key] for setting, key in keys.items() if key in fingerprints}


def _digest_by_subject(subject: Any, digest: Any) -> dict[str, str]:
    return {str(subject or ""): str(digest)} if digest else {}


def _code_version(run: Mapping[str, Any]) -> str:
    """ "<commit>", or "<commit>+<SHA-256 of the diff>" with uncommitted changes; empty if unknown."""
    if not run.get("commit") or (run.get("dirty") and not run.get("diff")):
        return ""
    return f"{run['commit']}+{run['diff']}" if run.get("dirty") else str(run["commit"])


# --- plug-ins ----------------------------------------------------------------------------------------------------


def describe(record: Record) -> str:
    """ "mine.py (sha256 1a2b3c4d5e6f; helper.py 6f5e4d3c2b1a)"."""
    modules = "".join(f"; {path} {digest[:12]}" for path, digest in record.get("modules", {}).items())
    return f"{record['plugin']} (sha256 {record['sha256'][:12]}{modules})"


def same_functions(earlier: Iterable[Record], current: Iterable[Record]) -> bool:
    """Whether two lists of records have the same functions, wherever the files are and whatever else they hold."""
    earlier, current = list(earlier), list(current)
    if {_record_key(record) for record in earlier} == {_record_key(record) for record in current}:
        return True
    of_earlier, of_current = ({n: r for r in records for n in r.get("names", ())} for records in (earlier, current))
    if not of_earlier or of_earlier.keys() != of_current.keys():
        return False
    return all(_is_same(name, record, of_current[name]) for name, record in of_earlier.items())


def versions_differ(records: Iterable[Record]) -> bool:
    """Whether any two records name the same function in different versions."""
    versions = Versions()
    return any(versions.number(name, record) for record in records for name in record.get("names", ()))


class Versions:
    """Numbers the versions of functions, from 0 for the first record of each."""

    def __init__(self) -> None:
        self.known: dict[str, list[Record]] = {}

    def number(self, name: str, record: Record) -> int:
        """The number of a function's version in a record."""
        known = self.known.setdefault(name, [])
        number = next((n for n, other in enumerate(known) if _is_same(name, record, other)), len(known))
        if number == len(known):
            known.append(record)
        return number


def _is_same(name: str, a: Record, b: Record) -> bool:
    """Whether a function has one version in two records: in equal files, or by its digests, of which there are two."""
    digests = ((a.get(kind, {}).get(name), b.get(kind, {}).get(name)) for kind in ("reach", "reached"))
    return _record_key(a) == _record_key(b) or any(one is not None and one == other for one, other in digests)


def _record_key(record: Record) -> str:
    return json.dumps([record.get("sha256"), record.get("modules", {})], sort_keys=True)


def _versions(earlier: Sequence[Record], current: Sequence[Record]) -> tuple[str, str]:
    """Both sides in words, without what they share."""
    earlier_names, current_names = ({describe(record) for record in records} for records in (earlier, current))
    return (
        ", ".join(sorted(earlier_names - current_names)) or "a plug-in of unknown version",
        ", ".join(sorted(current_names - earlier_names)) or "without it",
    )
