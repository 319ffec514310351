"""The provenance of a table: the machines, code and data behind its numbers, and where these are mixed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from fatbench.store import inputs
from fatbench.store.rows import grouped
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins
from fatbench.suite.types import seeds_text

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, eq=False)
class Origin:
    """The machine, code and data of one run of a stage; compared by identity, since `origin` makes equal ones once."""

    device: str
    precision: str
    commit: str
    dirty: bool
    data: tuple[str, str | None, str] | None  # name, variant, fingerprint
    attack: str  # implementation and version
    versions: tuple[tuple[str, str], ...]
    not_reproducible: str = ""  # why not, bit for bit
    diff: str = ""  # SHA-256 of what is not committed
    plugins: str = "[]"  # JSON of the records of `fatbench.suite.plugins`
    read: tuple[tuple[str, str], ...] = ()  # what these have read beside their code, with its digest


def origin(provenance: Mapping[str, Any]) -> Origin:
    """The origin that the provenance of a run states."""
    data, versions = provenance.get("data"), provenance.get("versions")
    return _once(
        str(provenance.get("device") or ""),
        str(provenance.get("precision") or ""),
        str(provenance.get("commit") or ""),
        bool(provenance.get("dirty")),
        (data["name"], data.get("variant"), data.get("fingerprint", "")) if isinstance(data, Mapping) else None,
        str(provenance.get("attack") or ""),
        tuple(sorted(versions.items())) if isinstance(versions, Mapping) else (),
        str(provenance.get("not_reproducible") or ""),
        str(provenance.get("diff") or ""),
        json.dumps(provenance.get("plugins") or [], sort_keys=True),
        tuple(sorted((provenance.get("read") or {}).items())),
    )


_once = functools.cache(Origin)


BEHIND = ("cell", "dataset", "metric", "n", "stage", "origin")  # a number, and one run of a stage behind it
OF_ORIGIN: dict[str, Callable[[Origin], str]] = {
    "device": lambda origin: origin.device,
    "precision": lambda origin: origin.precision,
    "code": lambda origin: _code(origin),
    "commit": lambda origin: f"{origin.commit}+dirty" if origin.commit and origin.dirty else origin.commit,
    "attack": lambda origin: origin.attack,
    "not_reproducible": lambda origin: origin.not_reproducible,
}


class Facts:
    """What is behind the numbers of a table: queries over a frame with a row for each run of a stage behind a number.

    behind: rows of BEHIND; metric "" of a training number, origin None where no run is known.
    """

    def __init__(self, behind: Iterable[tuple[str, str, str, int, str, Origin | None]] = ()) -> None:
        from pandas import DataFrame  # `status` and a run import this module without making tables

        frame = DataFrame(list(behind), columns=[*BEHIND], dtype=object).drop_duplicates(ignore_index=True)
        self.origins: list[Origin] = list(dict.fromkeys(frame["origin"].dropna()))
        what = frame["metric"].where(frame["stage"] != "train", "training")
        attacked = {stage: parsed(stage).precision for stage in frame["stage"].unique() if stage != "train"}
        columns = {}
        for name, of in OF_ORIGIN.items():
            texts = {origin: of(origin) for origin in self.origins}
            columns[name] = [texts.get(origin, "") for origin in frame["origin"]]
        self.frame = frame.assign(what=what, attacked=frame["stage"].map(attacked), **columns)

    def values(self, fact: str) -> list[str]:
        """The texts of a fact, that of most cells first, then that behind most kinds of numbers."""
        return self._values[fact]

    @functools.cached_property
    def _values(self) -> dict[str, list[str]]:
        values = {}
        for fact in OF_ORIGIN:
            known = self.frame.loc[self.frame[fact] != "", [fact, "what", "cell"]].drop_duplicates()
            cells = known.groupby(fact)["cell"]
            count, kinds = cells.nunique().to_dict(), cells.size().to_dict()
            # not as files were imported
            values[fact] = sorted(map(str, count), key=lambda text, c=count, k=kinds: (-c[text], -k[text], text))  # type: ignore[misc]
        return values

    @property
    def data(self) -> dict[str, list[tuple[str | None, str]]]:
        """Data set -> its variants and fingerprints, the published files first."""
        versions: dict[str, set[tuple[str | None, str]]] = {}
        for origin in self.origins:
            if origin.data is not None:
                versions.setdefault(origin.data[0], set()).add(origin.data[1:])
        return {name: sorted(found, key=lambda v: (v[0] or "", v[1])) for name, found in versions.items()}

    @functools.cached_property
    def sizes(self) -> dict[tuple[str, str], list[int]]:
        """(data set, metric) -> numbers of test images."""
        counted = self.frame[(self.frame["metric"] != "") & (self.frame["n"] != 0)]
        return _distinct(counted, ["dataset", "metric"], "n")

    @functools.cached_property
    def attacks(self) -> dict[str, list[str]]:
        """Metric -> the implementations it was measured with."""
        known = self.frame[(self.frame["what"] != "training") & (self.frame["attack"] != "")]
        return _distinct(known, "what", "attack")

    @functools.cached_property
    def attacked_in(self) -> dict[str, dict[str, int]]:
        """Metric -> precision of its attack -> number of cells."""
        known = self.frame[self.frame["attacked"].notna() & (self.frame["metric"] != "")]
        by_metric: dict[str, dict[str, int]] = {}
        for (metric, precision), cells in _distinct(known, ["metric", "attacked"], "cell").items():
            by_metric.setdefault(metric, {})[precision] = len(cells)
        return by_metric

    @functools.cached_property
    def versions(self) -> dict[str, list[str]]:
        """Package -> the versions that were used."""
        versions: dict[str, set[str]] = {}
        for package, version in (row for origin in self.origins for row in origin.versions):
            versions.setdefault(package, set()).add(version)
        return {package: sorted(known) for package, known in versions.items()}

    def plugins(self) -> list[dict[str, Any]]:
        """Each version of each plug-in behind the table once, with all names it brought and the cells that used it."""
        record_by_version: dict[str, dict[str, Any]] = {}
        for origin in self.origins:
            cells = {*self.frame.loc[self.frame["origin"] == origin, "cell"]}
            for record in json.loads(origin.plugins):
                merged = record_by_version.setdefault(inputs.describe(record), {**record, "names": [], "cells": set()})
                merged["names"] = sorted({*merged["names"], *record["names"]})
                merged |= {key: {**merged.get(key, {}), **record[key]} for key in ("reach", "reached") if key in record}
                merged["cells"] |= cells
        return list(record_by_version.values())

    def notes(self, settings: str = "", words: Mapping[str, str] = MappingProxyType({})) -> Iterable[tuple[str, str]]:
        """The notes on provenance under a table; a fact that differs between its numbers is noted as mixed.

        settings: those of its attacks, in words; they stand before what ran them. words: metric -> heading.
        """
        mixed, versions = self.mixed(words), self.versions

        def one_or_count(fact: str, plural: str) -> str:
            values = self.values(fact)
            return f"{len(values)} {plural}" if fact in mixed else next(iter(values), f"{plural[:-1]} unknown")

        yield "machine", f"{one_or_count('device', 'devices')}, {one_or_count('precision', 'precisions')}"
        known = len(versions.get("torch", ())) == 1
        torch = f"; torch {', '.join(versions['torch'])}" if known else ""
        yield "code", f"{one_or_count('code', 'commits')}{torch}"
        if reasons := self.values("not_reproducible"):
            yield "not reproducible bit for bit", "; ".join(reasons)
        for record in self.plugins():
            yield "plug-in", inputs.describe(record)
            current = plugins.records(plugins.loaded(record["names"]))
            if current and not inputs.same_functions([record], current):
                cells = f"{len(record['cells'])} cell{'s' * (len(record['cells']) != 1)}"
                text = f"the numbers of {cells} come from this version of {record['plugin']}; the file is now"
                text += f" {inputs.describe(current[0])}; fatbench run ... --rerun changed computes them again"
                yield "OLDER", text
        if settings:
            yield "attacks", settings
        attacked = self.attacked_in
        if {"fp32"} != {precision for by_precision in attacked.values() for precision in by_precision} != set():
            precisions = {metric: _precision_counts(by_precision) for metric, by_precision in attacked.items()}
            yield "attack precision", _by_metrics(precisions, words)
        if attacks := self.attacks:
            yield "attack code", _by_metrics({metric: " and ".join(code) for metric, code in attacks.items()}, words)
        for fact_name, text in mixed.items():
            yield "MIXED", f"{fact_name}: {text}"

    def mixed(self, words: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Every fact with more than one value, each value with its cells. words: metric -> heading."""
        mixed_facts: dict[str, str] = {}
        for name in ("device", "precision", "code"):
            if len(values := self.values(name)) > 1:
                rows = {text: self.frame[self.frame[name] == text] for text in values}
                # where each value stands behind the same metrics, these need not be named
                everywhere = len({frozenset(of_text["what"]) for of_text in rows.values()}) == 1
                mixed_facts[name] = "; ".join(
                    f"{text} ({_cell_count(of_text['cell'].nunique(), '' if everywhere else kinds)})"
                    for text, of_text in rows.items()
                    for kinds in [", ".join(dict.fromkeys(words.get(what, what) for what in of_text["what"].unique()))]
                )
        for name, versions_of_data in self.data.items():
            if len(versions_of_data) > 1:
                mixed_facts[f"{name} files"] = ", ".join(
                    f"{variant or 'published'} [{fingerprint[:8]}]" for variant, fingerprint in versions_of_data
                )
        for name, records in grouped((record["plugin"], record) for record in self.plugins()).items():
            if inputs.versions_differ(records):
                mixed_facts[f"versions of {name}"] = ", ".join(map(inputs.describe, records))
        read: dict[str, dict[str, None]] = {}
        for name, digest in (row for origin in self.origins for row in origin.read):
            read.setdefault(name, {})[digest] = None
        several: dict[str, list[str]] = {
            **{name: [f"[{inputs.short_digest(digest)}]" for digest in digests] for name, digests in read.items()},
            **{f"{words.get(metric, metric)} attack": code for metric, code in self.attacks.items()},
            **{f"{words.get(metric, metric)} precision": [_precision_counts(by_precision)] * len(by_precision)
               for metric, by_precision in self.attacked_in.items()},
            **{f"{words.get(metric, metric)} test images of {dataset}": [*map(str, sizes)]
               for (dataset, metric), sizes in self.sizes.items()},
        }  # fmt: skip
        mixed_facts |= {name: ", ".join(dict.fromkeys(texts)) for name, texts in several.items() if len(texts) > 1}
        packages = [f"{package} {', '.join(texts)}" for package, texts in self.versions.items() if len(texts) > 1]
        if packages:
            mixed_facts["packages"] = "; ".join(packages)
        return mixed_facts


def _distinct(frame: DataFrame, by: str | list[str], column: str) -> dict[Any, list[Any]]:
    """Key -> the values of a column, each once and sorted."""
    return {key: sorted({*values}) for key, values in frame.groupby(by, sort=False)[column]}


def _by_metrics(fact_of: Mapping[str, str], words: Mapping[str, str]) -> str:
    """Facts by metrics: "natural, PGD-20: fatbench 0.1.0; AA: pyautoattack 0.2.0"; "all attacks" if they share one."""
    metrics_of = grouped((fact, words.get(metric, metric)) for metric, fact in fact_of.items())
    if len(metrics_of) == 1 and len(fact_of) > 1:
        return f"all attacks: {next(iter(metrics_of))}"
    return "; ".join(f"{', '.join(metrics)}: {shared_fact}" for shared_fact, metrics in metrics_of.items())


def _precision_counts(by_precision: Mapping[str, int]) -> str:
    """Precisions in words: "bf16", or "fp32 (15 cells), bf16 (18 cells)"."""
    if len(by_precision) == 1:
        return next(iter(by_precision))
    return ", ".join(f"{precision} ({_cell_count(cells)})" for precision, cells in sorted(by_precision.items()))


def attacked_in(seeds: Iterable[int], precisions: Iterable[str]) -> str:
    """The precisions of an attack, one a seed, in words: "; attacked in bf16 at seeds 6, 7, fp32 at seed 8".

    Empty where all are float32.
    """
    seeds_by_precision = grouped(zip(precisions, seeds, strict=True))
    if len(seeds_by_precision) == 1:
        return "" if "fp32" in seeds_by_precision else f"; attacked in {next(iter(seeds_by_precision))}"
    of_seeds = seeds_by_precision.items()
    phrases = (f"{name} at seed{'s' * (len(seeds) > 1)} {seeds_text(seeds)}" for name, seeds in of_seeds)
    return f"; attacked in {', '.join(phrases)}" if seeds_by_precision else ""


def _code(origin: Origin) -> str:
    if not origin.commit:
        return ""
    is_hash = set(origin.commit) <= set("0123456789abcdef")
    commit = f"commit {origin.commit[:10]}" if is_hash else origin.commit
    edited = f" [{origin.diff[:8]}]" if origin.diff else ""
    return f"{commit} with uncommitted changes{edited}" if origin.dirty else commit


def _cell_count(cells: int, kinds: str = "") -> str:
    """A count: "2 cells", or "training of 2 cells" where the values are not behind the same metrics."""
    return f"{kinds} of " * bool(kinds) + f"{cells} cell{'s' * (cells != 1)}"
