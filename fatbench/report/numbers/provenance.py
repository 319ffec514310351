"""The provenance of a table: the machines, code and data behind its numbers, and where these are mixed."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fatbench.store import inputs
from fatbench.store.stage_names import parsed
from fatbench.suite import plugins
from fatbench.suite.seeds import seeds_text


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


@dataclass
class TableFacts:
    """The origins of a table's numbers, each with its metrics and cells."""

    origins: dict[tuple[str, Origin], set[str]] = field(default_factory=dict)  # (what, origin) -> cells
    sizes: dict[tuple[str, str], set[int]] = field(default_factory=dict)  # (data set, metric) -> numbers of test images
    # metric -> precision of its attack -> cells
    attacked_in: dict[str, dict[str, set[str]]] = field(default_factory=dict)

    def add(self, cell: str, dataset: str, metric: str, n: int, stages: Iterable[tuple[str, Iterable[Origin]]]) -> None:
        """Add one number: `metric` ("" for a training number), its n, and the stages it was read from."""
        for stage, origins in stages:
            fact_name = "training" if stage == "train" else metric
            if stage != "train" and metric:
                self.attacked_in.setdefault(metric, {}).setdefault(parsed(stage).precision, set()).add(cell)
            for origin in origins:
                self.origins.setdefault((fact_name, origin), set()).add(cell)
        if metric and n:
            self.sizes.setdefault((dataset, metric), set()).add(n)

    @property
    def data(self) -> dict[str, list[tuple[str | None, str]]]:
        """Data set -> its variants and fingerprints."""
        versions_by_set: dict[str, list[tuple[str | None, str]]] = {}
        for _, origin in self.origins:
            if origin.data is not None and origin.data[1:] not in versions_by_set.setdefault(origin.data[0], []):
                versions_by_set[origin.data[0]].append(origin.data[1:])
        # the published files first
        return {name: sorted(versions, key=lambda v: (v[0] or "", v[1])) for name, versions in versions_by_set.items()}

    def values(self, fact_of: Callable[[Origin], str]) -> dict[str, dict[str, set[str]]]:
        """Text of a fact -> metric or "training" -> its cells, that of most cells first; without empty texts."""
        cells_by_text: dict[str, dict[str, set[str]]] = {}
        for (fact_name, origin), cells in self.origins.items():
            if text := fact_of(origin):
                cells_by_text.setdefault(text, {}).setdefault(fact_name, set()).update(cells)

        def rank(text: str) -> tuple[int, int, str]:
            cell_sets = cells_by_text[text].values()
            return -len(set().union(*cell_sets)), -sum(map(len, cell_sets)), text

        return {text: cells_by_text[text] for text in sorted(cells_by_text, key=rank)}  # not as files were imported

    def attacks(self) -> dict[str, list[str]]:
        """Metric -> the implementations it was measured with."""
        code_by_metric: dict[str, list[str]] = {}
        for fact_name, origin in self.origins:
            if (
                fact_name != "training"
                and origin.attack
                and origin.attack not in code_by_metric.setdefault(fact_name, [])
            ):
                code_by_metric[fact_name].append(origin.attack)
        return {metric: sorted(implementations) for metric, implementations in code_by_metric.items()}

    def versions(self) -> dict[str, list[str]]:
        """Package -> the versions that were used."""
        versions_by_package: dict[str, list[str]] = {}
        for _, origin in self.origins:
            for package, version in origin.versions:
                if version not in versions_by_package.setdefault(package, []):
                    versions_by_package[package].append(version)
        return {package: sorted(versions) for package, versions in versions_by_package.items()}

    def plugins(self) -> list[dict[str, Any]]:
        """Each version of each plug-in behind the table once, with all names it brought and the cells that used it."""
        record_by_version: dict[str, dict[str, Any]] = {}
        for (_, origin), cells in self.origins.items():
            for record in json.loads(origin.plugins):
                merged = record_by_version.setdefault(inputs.describe(record), {**record, "names": [], "cells": set()})
                merged["names"] = sorted({*merged["names"], *record["names"]})
                if "reached" in merged:
                    merged["reached"] = {**merged["reached"], **record.get("reached", {})}
                merged["cells"] |= cells
        return list(record_by_version.values())

    def _plugin_notes(self) -> Iterable[tuple[str, str]]:
        for record in self.plugins():
            yield "plug-in", inputs.describe(record)
            loaded = plugins.loaded_version(record)
            if loaded is not None and not inputs.same_functions([record], [loaded]):
                cells = f"{len(record['cells'])} cell{'s' * (len(record['cells']) != 1)}"
                text = f"the numbers of {cells} come from this version of {record['plugin']}; the file is now"
                text += f" {inputs.describe(loaded)}; fatbench run ... --rerun changed computes them again"
                yield "OLDER", text

    def notes(self, settings: str = "", words: Mapping[str, str] = MappingProxyType({})) -> Iterable[tuple[str, str]]:
        """The notes on provenance under a table; a fact that differs between its numbers is noted as mixed.

        settings: those of its attacks, in words; they stand before what ran them. words: metric -> heading.
        """
        devices, precisions, codes = self.values(_device), self.values(_precision), self.values(_code)
        versions, attacks = self.versions(), self.attacks()
        mixed = self.mixed(words)
        device = f"{len(devices)} devices" if "device" in mixed else next(iter(devices), "device unknown")
        precision = (
            f"{len(precisions)} precisions" if "precision" in mixed else next(iter(precisions), "precision unknown")
        )
        yield "machine", f"{device}, {precision}"
        torch = (
            f"; torch {', '.join(versions['torch'])}" if "torch" in versions and "torch version" not in mixed else ""
        )
        code = f"{len(codes)} commits" if "code" in mixed else next(iter(codes), "commit unknown")
        yield "code", f"{code}{torch}"
        if reasons := self.values(lambda origin: origin.not_reproducible):
            yield "not reproducible bit for bit", "; ".join(reasons)
        yield from self._plugin_notes()
        if settings:
            yield "attacks", settings
        if {"fp32"} != {precision for by_precision in self.attacked_in.values() for precision in by_precision} != set():
            metrics_by_precision: dict[str, list[str]] = {}
            for metric, by_precision in self.attacked_in.items():
                metrics_by_precision.setdefault(_precision_counts(by_precision), []).append(words.get(metric, metric))
            yield "attack precision", _by_metrics(metrics_by_precision)
        if attacks:
            by_code: dict[str, list[str]] = {}
            for metric, implementations in attacks.items():
                by_code.setdefault(" and ".join(implementations), []).append(words.get(metric, metric))
            yield "attack code", _by_metrics(by_code)
        for fact_name, text in mixed.items():
            yield "MIXED", f"{fact_name}: {text}"

    def mixed(self, words: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Every fact with more than one value, each value with its cells. words: metric -> heading."""
        mixed_facts: dict[str, str] = {}
        for name, fact_of in (("device", _device), ("precision", _precision), ("code", _code)):
            values = self.values(fact_of)
            if len(values) > 1:
                # where each value stands behind the same metrics, these need not be named
                everywhere = len({frozenset(cells_of) for cells_of in values.values()}) == 1
                mixed_facts[name] = "; ".join(
                    f"{text} "
                    f"({_cell_count({words.get(fact, fact): ids for fact, ids in cells_by_fact.items()}, everywhere)})"
                    for text, cells_by_fact in values.items()
                )
        for name, versions_of_data in self.data.items():
            if len(versions_of_data) > 1:
                mixed_facts[f"{name} files"] = ", ".join(
                    f"{variant or 'published'} [{fingerprint[:8]}]" for variant, fingerprint in versions_of_data
                )
        by_plugin: dict[str, list[dict[str, Any]]] = {}
        for record in self.plugins():
            by_plugin.setdefault(record["plugin"], []).append(record)
        for name, records in by_plugin.items():
            if inputs.versions_differ(records):
                mixed_facts[f"versions of {name}"] = ", ".join(map(inputs.describe, records))
        digests_read: dict[str, dict[str, None]] = {}
        for _, origin in self.origins:
            for name, digest in origin.read:
                digests_read.setdefault(name, {})[f"[{inputs.short_digest(digest)}]"] = None
        mixed_facts |= {name: ", ".join(digests) for name, digests in digests_read.items() if len(digests) > 1}
        for metric, implementations in self.attacks().items():
            if len(implementations) > 1:
                mixed_facts[f"{words.get(metric, metric)} attack"] = ", ".join(implementations)
        for metric, by_precision in self.attacked_in.items():
            if len(by_precision) > 1:
                mixed_facts[f"{words.get(metric, metric)} precision"] = _precision_counts(by_precision)
        for package, versions in self.versions().items():
            if len(versions) > 1:
                mixed_facts[f"{package} version"] = ", ".join(versions)
        for (dataset, metric), sizes in self.sizes.items():
            if len(sizes) > 1:
                mixed_facts[f"{words.get(metric, metric)} test images of {dataset}"] = ", ".join(
                    map(str, sorted(sizes))
                )
        return mixed_facts


def _by_metrics(metrics_of: Mapping[str, list[str]]) -> str:
    """Facts by metrics: "natural, PGD-20: fatbench 0.1.0; AA: pyautoattack 0.2.0"; "all attacks" if they share one."""
    if len(metrics_of) == 1 and len(next(iter(metrics_of.values()))) > 1:
        return f"all attacks: {next(iter(metrics_of))}"
    return "; ".join(f"{', '.join(metrics)}: {shared_fact}" for shared_fact, metrics in metrics_of.items())


def _precision_counts(by_precision: Mapping[str, set[str]]) -> str:
    """Precisions in words: "bf16", or "fp32 (15 cells), bf16 (18 cells)"."""
    if len(by_precision) == 1:
        return next(iter(by_precision))
    return ", ".join(
        f"{precision} ({_cell_count({'': cells}, True)})" for precision, cells in sorted(by_precision.items())
    )


def attacked_in(seeds: Iterable[int], precisions: Iterable[str]) -> str:
    """The precisions of an attack, one a seed, in words: "; attacked in bf16 at seeds 6, 7, fp32 at seed 8".

    Empty where all are float32.
    """
    seeds_by_precision: dict[str, list[int]] = {}
    for seed, precision in zip(seeds, precisions, strict=True):
        seeds_by_precision.setdefault(precision, []).append(seed)
    if len(seeds_by_precision) == 1:
        return "" if "fp32" in seeds_by_precision else f"; attacked in {next(iter(seeds_by_precision))}"
    phrases = (
        f"{name} at seed{'s' * (len(seeds_of) > 1)} {seeds_text(seeds_of)}"
        for name, seeds_of in seeds_by_precision.items()
    )
    return f"; attacked in {', '.join(phrases)}" if seeds_by_precision else ""


def _device(origin: Origin) -> str:
    return origin.device


def _precision(origin: Origin) -> str:
    return origin.precision


def _code(origin: Origin) -> str:
    if not origin.commit:
        return ""
    is_hash = set(origin.commit) <= set("0123456789abcdef")
    commit = f"commit {origin.commit[:10]}" if is_hash else origin.commit
    edited = f" [{origin.diff[:8]}]" if origin.diff else ""
    return f"{commit} with uncommitted changes{edited}" if origin.dirty else commit


def _cell_count(cells_of: Mapping[str, set[str]], everywhere: bool) -> str:
    """A count: "2 cells", or "training of 2 cells" where the values are not behind the same metrics."""
    cells = len(set().union(*cells_of.values()))
    count = f"{cells} cell{'s' * (cells != 1)}"
    return count if everywhere else f"{', '.join(cells_of)} of {count}"
