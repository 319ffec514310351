"""The suite files that are shipped, and how suite files are read: what they ask for, what they share, what they refuse.

After a deliberate change of a suite, of a default or of a setting's name, write the golden identities anew with

    FATBENCH_UPDATE_GOLDEN=1 pytest tests/test_suites.py -k golden

and look at the difference: a cell whose identity changes is a cell that has to be trained again.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from small import small

from fatbench import report
from fatbench.errors import NothingMatched, SpecError
from fatbench.report.numbers.sources import Source
from fatbench.settings import IN_VARIANT
from fatbench.suite import calls, cost, files, tables, threats
from fatbench.suite.cells import Cell, Plan
from fatbench.suite.files import Suite, load
from fatbench.suite.tables import Table
from fatbench.suite.types import parse_seeds

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "suites"
GOLDEN = Path(__file__).parent / "golden" / "suite_ids.json"
NAMES = sorted(file.stem for file in FOLDER.glob("*.yaml") if "." not in file.stem)
PRESETS = ("paper", "quick", "smoke")
OFTEN = ["paper", pytest.param("quick", marks=pytest.mark.nightly), "smoke"]
# A suite of each paper and of each kind of our own; the others extend them.
QUICK = ("adfl-compare", "april-learning", "fat-byzantine", "fat-personal", "fedvkd-cifar10", "sfat-cifar10")
QUICKLY = [pytest.param(name, marks=[pytest.mark.nightly] * (name not in QUICK)) for name in NAMES]
OF_THE_ISSUE = {
    "sfat-cifar10", "sfat-cifar100", "sfat-svhn", "sfat-celeba", "sfat-clients", "sfat-local-methods", "sfat-strength",
    "sfat-per-client", "sfat-local-epochs", "sfat-reverse", "sfat-softbetter", "sfat-anneal", "sfat-drift", "sfat-mu",
    "sfat-unequal", "sfat-participation", "sfat-standard", "sfat-audit",
}  # fmt: skip
OURS = sorted(OF_THE_ISSUE)


@cache
def read(name: str) -> Suite:
    return load(str(FOLDER / f"{name}.yaml"))


@cache
def plan(name: str, preset: str = "paper") -> Plan:
    return read(name).plan(preset)


def cell(name: str, preset: str = "paper", **key: str) -> Cell:
    """The first-seed cell of the one grid point with these labels and no other axes."""
    wanted = {axis.replace("_", " "): label for axis, label in key.items()}
    found = [c for c in plan(name, preset).cells if c.key == wanted]
    assert found, f"{name} has no point {wanted}"
    return found[0]


def short(kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A call of a canonical cell as one would write it: settings at their default left out."""
    return calls.without_defaults(calls.call(kind, spec))


def points(table: Table, plan: Plan) -> list[dict[str, str]]:
    """The grid points that a table shows, each once."""
    keys = [c.key for c in plan.cells if all(c.key.get(axis) in labels for axis, labels in table.where.items())]
    return [dict(items) for items in dict.fromkeys(tuple(key.items()) for key in keys)]


# --- what is shipped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", OFTEN)
def test_plans(name: str, preset: str) -> None:
    suite, asked = read(name), plan(name, preset)
    assert suite.name == name
    assert suite.description and suite.tables
    models = [c for c in asked.cells if c.spec["algorithm"]["name"] != "gradient_inversion"]
    assert asked.unique() and all(c.evaluations for c in models)
    assert bool(asked.note) == (preset != "paper"), "a reduced preset says under its tables what was reduced"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("preset", OFTEN)
def test_every_table_has_rows_and_one_point_to_a_place(name: str, preset: str) -> None:
    asked = plan(name, preset)
    report.check(read(name), asked)  # SpecError: two points at one place of a table or a figure
    for table in read(name).tables:
        axes = [axis for axis in (*table.rows, *table.across) if axis not in threats.AXES]
        places = [tuple(p.get(axis) for axis in axes) for p in points(table, asked)]
        assert places, table.id
        assert all(None not in place for place in places), table.id
    if preset == "paper":
        assert len(report.build_figures(read(name), asked, None)) == len(read(name).figures), "a figure without a point"


@pytest.mark.parametrize("name", NAMES)
def test_every_point_is_in_a_table(name: str) -> None:
    shown = [p for table in read(name).tables for p in points(table, plan(name))]
    assert all(c.key in shown for c in plan(name).cells)


def _logged() -> set[str]:
    """The metrics that a training round logs, from the table at the head of measures.py."""
    text = (ROOT / "fatbench" / "engine" / "measures.py").read_text().split('"""')[1]
    named = {name for row in re.findall(r"^\| ([a-z_, ]+) \|", text, re.MULTILINE) for name in row.split(", ")}
    return named - {"metric"}


def _logged_besides() -> set[str]:
    """Names that aggregators, algorithms and the footprint may log: every word in quotes in their source."""
    methods, engine = ROOT / "fatbench" / "methods", ROOT / "fatbench" / "engine"
    files = [methods / "aggregators.py", methods / "adfl.py", methods / "inversions" / "image_measures.py"]
    files += [engine / "experiment.py", engine / "footprint.py", *(methods / "algorithms").glob("*.py")]
    return {name for file in files for name in re.findall(r"\"([a-z][a-z0-9_]*)\"", file.read_text())}


DIAGNOSED = re.compile(
    r"svcca_b\d+_(c\d+)_(c\d+|server)_(clean|adv)|boundary_apart|backdoor_(success|none)|leak(_initial|_grey)?_(psnr|ssim|correlation|identification)|leak_candidates_used"
    r"|exposed_(component|initial|surrogate|known|optimised|update|candidates)"
    r"|member_(loss|adversarial|others)_(tpr|clients|fpr|auc|epsilon|above)"
)
OF_A_CLASS = re.compile(r".*_class|label_clients|updated_fraction")


@pytest.mark.parametrize("name", NAMES)
def test_every_column_has_a_source(name: str) -> None:
    # AutoAttack is a column of reduced presets where the paper has none
    metrics = {metric for preset in read(name).presets() for metric in plan(name, preset).metrics()}
    evaluate = read(name).contents.evaluate
    metrics |= {*evaluate.attacks, *evaluate.transfer}  # a list of radii or of models has several metrics
    logged = _logged() | _logged_besides()
    assert {"drift_post", "grad_var", "monitor"} <= _logged()
    shown = [(t.id, h, text) for t in read(name).tables for h, text in t.values.items()]
    shown += [(f.id, h, text) for f in read(name).figures for h, text in f.series.items()]
    for id, heading, text in shown:
        source = tables.SOURCE.match(text)
        if source["stage"] == "artifact":
            continue
        if source["metric"] is None:  # over several evaluations
            assert set(text.partition(":")[2].split("+")) <= metrics, f"{id}: {heading}: {text}"
            continue
        known = logged if source["stage"] == "train" else metrics
        metric = re.sub("(_exact)?_(ci|low|high|chance)$", "", source["metric"])
        assert metric in known or DIAGNOSED.fullmatch(metric), f"{id}: {heading}: {text}"
        if source["round"]:
            rounds = {c.spec["algorithm"]["rounds"] for c in plan(name).cells}
            assert int(source["round"]) <= min(rounds)
        if (source["client"] or "*") != "*" and not OF_A_CLASS.fullmatch(source["metric"]):
            clients = {c.spec["partition"]["clients"] for c in plan(name).cells}
            assert int(source["client"]) < min(clients)


def trained(spec: dict[str, Any]) -> float:
    """Image passes forward of training, the monitor's apart."""
    return (cost.training(spec) or cost.Work()).forward - cost.monitoring(spec).forward


@pytest.mark.parametrize("name", OURS)
def test_smoke_is_small_enough_for_any_machine(name: str) -> None:
    """A few thousand digits' worth of training per cell, no download, AutoAttack on 2 images of one or two cells."""
    asked = plan(name, "smoke")
    few = [e.n for c in asked.unique() for e in c.evaluations if e.label == "autoattack"]
    assert set(few) <= {2} and len(few) <= 2
    assert bool(few) == ("autoattack" in plan(name).metrics())
    for c in asked.unique():
        spec = c.spec
        assert spec["data"]["name"] == ("plane" if name == "sfat-plane" else "digits")
        assert spec["train"] <= 340 and spec["test"] <= 100
        assert spec["algorithm"]["rounds"] <= 2
        assert trained(spec) <= 25_000, f"{c.key}: {trained(spec)} image passes"
        assert all(e.n is not None and e.n <= 100 for e in c.evaluations)


@pytest.mark.parametrize("name", OURS)
def test_quick_is_the_same_structure_with_less_work(name: str) -> None:
    """Passes of images; the networks are narrower as well, by a factor of 16 in multiplications."""
    paper, quick = plan(name), plan(name, "quick")
    assert {tuple(c.key.items()) for c in paper.cells} == {tuple(c.key.items()) for c in quick.cells}
    assert {c.spec["seed"] for c in quick.cells} == {6}

    def work(asked: Plan) -> float:
        return sum(trained({**c.spec, "train": c.spec["train"] or 50_000}) for c in asked.unique())

    assert work(quick) <= work(paper) / (1 if name == "sfat-celeba" else 12)
    assert work(quick) <= 500e6


@pytest.mark.parametrize("name", OURS)
def test_same_attacks_keep_their_names_in_every_preset(name: str) -> None:
    """PGD-20 has 20 steps in smoke too, and eps follows the data set: a metric's name never changes its meaning."""
    for preset in PRESETS:
        for c in plan(name, preset).cells:
            base = read(name).contents.base["data"]["name"] == "svhn"
            svhn = c.key["dataset"] == "SVHN" if "dataset" in c.key else base
            eps, step = ("4/255", "1/255") if svhn else ("8/255", "2/255")
            attacks = {e.label: short("Attack", e.attack) for e in c.evaluations}
            assert attacks["natural"] == {"name": "natural"}
            assert attacks["fgsm"] == {"name": "fgsm", "eps": eps}
            assert attacks["fgsm_sfat"] == {"name": "fgsm_sfat", "eps": eps, "step": "1/255" if svhn else "8/255"}
            assert attacks["pgd20"] == {"name": "pgd", "eps": eps, "step": step, "steps": 20}
            assert attacks["cw"] == {"name": "cw", "eps": eps, "step": step}  # 30 steps, kappa 50
            if "autoattack" in attacks:
                assert attacks["autoattack"] == {"name": "autoattack", "eps": eps}
            assert set(attacks) <= {"natural", "fgsm", "fgsm_sfat", "pgd20", "cw", "autoattack"}
            monitor, at = c.spec["monitor"], {"eps": eps, "step": step, "steps": 20}
            assert monitor == {"name": "natural"} or at.items() <= monitor.items()


@pytest.mark.parametrize("name", OURS)
def test_autoattack_is_where_the_paper_has_it_and_in_every_quick_preset_under_attack(name: str) -> None:
    papers = name in ("sfat-cifar10", "sfat-cifar100", "sfat-svhn", "sfat-audit")
    assert ("autoattack" in plan(name).metrics()) == papers
    quick = plan(name, "quick").unique()
    none = ("sfat-celeba", "sfat-drift", "sfat-per-client")  # two classes; no attack in a table; clients' own models
    attacked = name not in none and read(name).tables and {"pgd20", "cw"} & {*plan(name).metrics()}
    assert {e.n for c in quick for e in c.evaluations if e.label == "autoattack"} == ({200} if attacked else set())


# --- golden identities --------------------------------------------------------------------------------------------


def _ids(name: str) -> dict[str, list[Any]]:
    result = {}
    for preset in read(name).presets():
        ids = sorted(c.id for c in plan(name, preset).unique())
        result[preset] = [len(ids), hashlib.sha256("\n".join(ids).encode()).hexdigest()[:16]]
    return result


def test_golden_identities() -> None:
    """Number of cells and hash of their sorted identities, for every suite and preset."""
    found = {name: _ids(name) for name in NAMES}
    if os.environ.get("FATBENCH_UPDATE_GOLDEN"):
        rows = [f'  "{name}": {json.dumps(presets)}' for name, presets in found.items()]
        GOLDEN.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    changed = sorted(name for name in {*found, *golden} if found.get(name) != golden.get(name))
    assert not changed, f"identities differ from {GOLDEN.name}; if meant, run again with FATBENCH_UPDATE_GOLDEN=1"


# --- variants -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", IN_VARIANT)
def test_a_suite_in_a_variant_is_the_presets_that_begin_with_it(name: str) -> None:
    (suite, variant), named = IN_VARIANT[name], load(name)
    assert named.name == suite and {preset.split("-")[0] for preset in named.presets()} == {variant}
    for short, long in (("paper", variant), ("smoke", f"{variant}-smoke"), (variant, variant)):
        found = named.plan(short, refuse=False)
        assert (found.suite, found.preset, found.cells) == (suite, long, plan(suite, long).cells)


def test_others_extend_a_suite_in_one_variant_or_in_none(tmp_path: Path) -> None:
    """With presets of plain names and the variant's settings in `base`, also below presets of their own."""
    presets = "presets: {cpu: {seeds: [6]}, mine: {axes: {dataset: [CIFAR-10]}, seeds: [6]}}\n"
    for extended in ("sfat-audit-jpeg75", "sfat-audit"):
        (tmp_path / f"of-{extended}.yaml").write_text(f"name: x\ntitle: t\nextends: {extended}\n{presets}")
    of_variant, of_none = (load(str(tmp_path / f"of-{name}.yaml")) for name in ("sfat-audit-jpeg75", "sfat-audit"))
    assert of_variant.presets() == ["paper", "quick", "smoke", "cpu", "precision", "nin", "mine"]
    assert [c.id for c in of_variant.plan("cpu").cells] == [
        c.id for c in plan("sfat-audit", "jpeg75-cpu").cells if c.spec["seed"] == 6
    ]
    assert {c.spec["data"]["variant"] for c in of_variant.plan("mine").cells} == {"jpeg75"}
    assert of_none.presets() == ["paper", "quick", "smoke", "cpu", "mine"]
    assert {c.spec["data"]["variant"] for c in of_none.plan("mine").cells} == {None}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("variants: {a: {model: {widht: 4}}}", "x.yaml:4: widht: "),
        ("variants: [a]", "x.yaml:4: variants: expected a mapping"),
        ("variants: {a: 3}", "x.yaml:4: a: expected a mapping, got 3"),
    ],
)
def test_a_wrong_variant_has_its_line(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(f"name: x\ntitle: t\nextends: sfat-cifar10\n{text}\n")
    with pytest.raises(SpecError, match=re.escape(problem)):
        load(str(tmp_path / "x.yaml")).plan("a")


# --- what is shared -----------------------------------------------------------------------------------------------

SHARED: list[list[tuple[str, dict[str, str]]]] = [
    [  # FAT, FedAvg, Non-IID, CIFAR-10
        ("sfat-cifar10", {"partition": "Non-IID", "optimizer": "FedAvg", "method": "FAT"}),
        ("sfat-audit", {"dataset": "CIFAR-10", "method": "FAT"}),
        ("sfat-local-methods", {"local": "AT", "method": "FAT"}),
        ("sfat-strength", {"dataset": "CIFAR-10", "eps": "8/255"}),
        ("sfat-per-client", {"dataset": "CIFAR-10", "method": "FAT", "holdout": "none"}),
        ("sfat-local-epochs", {"dataset": "CIFAR-10", "E": "10", "method": "FAT"}),
        ("sfat-reverse", {"dataset": "CIFAR-10", "r": "1.0"}),
        ("sfat-softbetter", {"dataset": "CIFAR-10", "method": "FAT"}),
        ("sfat-anneal", {"dataset": "CIFAR-10", "method": "FAT"}),
        ("sfat-drift", {"dataset": "CIFAR-10", "split": "equal", "optimizer": "FedAvg", "method": "FAT"}),
        ("sfat-standard", {"training": "AT", "optimizer": "FedAvg", "alpha": "0"}),
    ],
    [  # SFAT, FedAvg, Non-IID, CIFAR-10
        ("sfat-cifar10", {"partition": "Non-IID", "optimizer": "FedAvg", "method": "SFAT"}),
        ("sfat-audit", {"dataset": "CIFAR-10", "method": "SFAT"}),
        ("sfat-per-client", {"dataset": "CIFAR-10", "method": "SFAT", "holdout": "none"}),
        ("sfat-local-epochs", {"dataset": "CIFAR-10", "E": "10", "method": "SFAT"}),
        ("sfat-reverse", {"dataset": "CIFAR-10", "r": "1.4"}),
        ("sfat-softbetter", {"dataset": "CIFAR-10", "method": "SFAT"}),
        ("sfat-anneal", {"dataset": "CIFAR-10", "method": "SFAT"}),
        ("sfat-drift", {"dataset": "CIFAR-10", "split": "equal", "optimizer": "FedAvg", "method": "SFAT"}),
        ("sfat-standard", {"training": "AT", "optimizer": "FedAvg", "alpha": "1/6"}),
    ],
    [  # 20 clients, SVHN: Table 20's ratio 1.0 repeats Table 16
        ("sfat-clients", {"dataset": "SVHN", "clients": "20", "skew": "s=2", "method": "SFAT"}),
        ("sfat-participation", {"participation": "1.0", "method": "SFAT"}),
    ],
    [  # 20 clients, CIFAR-100
        ("sfat-cifar100", {"partition": "Non-IID", "optimizer": "FedAvg", "method": "SFAT"}),
        ("sfat-clients", {"dataset": "CIFAR-100", "clients": "20", "skew": "s=2", "method": "SFAT"}),
        ("sfat-audit", {"dataset": "CIFAR-100", "method": "SFAT"}),
    ],
    [  # the unequal split of Table 14 is Table 17's
        ("sfat-drift", {"dataset": "CIFAR-10", "split": "unequal", "optimizer": "FedProx", "method": "SFAT"}),
        ("sfat-unequal",
         {"dataset": "CIFAR-10", "split": "CIFAR-10 K=5 6000-13000", "optimizer": "FedProx", "method": "SFAT"}),
    ],
]  # fmt: skip


@pytest.mark.parametrize("group", SHARED, ids=lambda group: group[0][0] + " " + " ".join(group[0][1].values()))
def test_suites_share_cells(group: list[tuple[str, dict[str, str]]]) -> None:
    """What one suite has trained, another only evaluates."""
    assert len({cell(name, **key).id for name, key in group}) == 1


# --- the paper's settings (methods: SFAT) --------------------------------------------------------------------------

AT_8 = {"name": "at", "attack": {"name": "pgd", "eps": "8/255", "step": "2/255", "steps": 10}}
AT_4 = {"name": "at", "attack": {"name": "pgd", "eps": "4/255", "step": "1/255", "steps": 10}}
SETTINGS: dict[str, dict[str, Any]] = {
    "sfat-cifar10": {
        "data": "cifar10", "model": {"name": "nin"}, "clients": 5, "top": 1, "epochs": 10, "batch": 32,
        "objective": AT_8, "alpha": {"FedAvg": "1/6", "FedProx": "1/11", "SCAFFOLD": "1/11"},
        "r": {"FedAvg": 1.4, "FedProx": 1.2, "SCAFFOLD (released)": 1.2},
    },
    "sfat-cifar100": {
        "data": "cifar100", "model": {"name": "resnet18"}, "clients": 20, "top": 4, "epochs": 3,
        "batch": 128, "objective": AT_8, "alpha": {"FedAvg": "1/11", "FedProx": "1/11", "SCAFFOLD": "3/23"},
        "r": {"FedAvg": 1.2, "FedProx": 1.2, "SCAFFOLD (released)": 1.3},
    },
    "sfat-svhn": {
        "data": "svhn", "model": {"name": "small_cnn"}, "clients": 5, "top": 1, "epochs": 2, "batch": 128,
        "objective": AT_4, "alpha": {"FedAvg": "1/11", "FedProx": "1/11", "SCAFFOLD": "1/11"},
        "r": {"FedAvg": 1.2, "FedProx": 1.2, "SCAFFOLD (released)": 1.2},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_tables_3_and_21(name: str) -> None:
    want = SETTINGS[name]
    for c in plan(name).cells:
        spec, algorithm, optimizer, method = c.spec, c.spec["algorithm"], c.key["optimizer"], c.key["method"]
        local = algorithm["local"]
        assert short("Data", spec["data"]) == {"name": want["data"]}
        assert short("Model", spec["model"]) == want["model"]
        assert spec["seed"] in (6, 7, 8)
        assert (spec["validation"], spec["train"], spec["test"], spec["client_holdout"]) == (1000, None, None, 0.0)
        assert (spec["monitor_every"], spec["monitor_n"]) == (1, None)
        assert algorithm["rounds"] == 100
        assert (local["batch"], local["lr"], local["momentum"]) == (want["batch"], 0.01, 0.9)
        decay = 0.0 if "released" in f"{optimizer} {method}" else 1e-4
        assert (local["weight_decay"], local["lr_decay"], local["clip"]) == (decay, 1.0, None)
        assert short("Objective", local["objective"]) == want["objective"]
        if optimizer.startswith("Centralized"):
            assert (algorithm["name"], spec["partition"]) == ("centralized", {"name": "iid", "clients": 1})
            assert algorithm["moments"] == ("released" if "released" in optimizer else "reset")
            continue
        assert local["epochs"] == want["epochs"]
        assert algorithm["participation"] == 1.0
        clients = 5 if c.key["partition"] == "Non-IID K=5" else want["clients"]
        iid = c.key["partition"] == "IID"
        shah = {"name": "shah", "clients": clients}  # the default skew is the release's 2
        assert short("Partition", spec["partition"]) == ({"name": "iid", "clients": clients} if iid else shah)
        assert iid or spec["partition"]["skew"] == 2
        kind = {"SCAFFOLD": "scaffold", "SCAFFOLD (released)": "scaffold_sfat"}.get(optimizer, "fedavg")
        assert algorithm["name"] == kind
        if kind == "scaffold_sfat":  # the release, also where there is batch normalisation
            assert algorithm["buffers"] == algorithm["copy_start"] == (name != "sfat-cifar10")
        proximal = {"FedProx": "norm_per_tensor", "FedProx (squared)": "squared"}.get(optimizer)
        term = local["proximal"]
        assert (term and short("Proximal", term)) == (proximal and {"name": proximal, "mu": 0.01})
        aggregator, top = short("Aggregator", algorithm["aggregator"]), 1 if clients == 5 else want["top"]
        if method == "FAT":
            assert aggregator == {"name": "samples"}
        elif method == "SFAT":
            alpha = want["alpha"][optimizer.split(" ")[0]]
            assert aggregator == {"name": "sfat", "alpha": alpha, "top": top}
            assert algorithm["aggregator"]["rank_by"] == "nk_weighted"
        else:
            assert aggregator == {"name": "sfat_released", "r": want["r"][optimizer], "top": top}
    assert plan(name).checkpoints == ["last", "best-val", "best-test"]


def test_tables_stand_in_the_order_of_the_paper() -> None:
    """Rows by optimizer, variants under the row that they vary; Non-IID left of IID, as in Table 21."""
    rows = {}
    for table in read("sfat-cifar10").tables:
        shown = points(table, plan("sfat-cifar10"))
        rows[table.id] = list(dict.fromkeys(tuple(p[axis] for axis in table.rows) for p in shown))
        if table.id == "T21":
            assert list(dict.fromkeys(p["partition"] for p in shown)) == ["Non-IID", "IID"]
    pairs = [(o, m) for o in ("FedAvg", "FedProx", "SCAFFOLD") for m in ("FAT", "SFAT")]
    assert rows["T3"] == pairs
    assert rows["T21"] == [*pairs, ("Centralized", "AT"), ("Centralized (released)", "AT")]
    assert rows["T3-variants"][:3] == [("FedAvg", "FAT"), ("FedAvg", "SFAT"), ("FedAvg", "SFAT (released)")]


def test_unequal_splits_have_the_published_sizes() -> None:
    """In shards, as the release deals them: SVHN 5860-26370 is 4 to 18 shards of 1465, 50-16700 is 1 to 334 of 50."""
    numpy = pytest.importorskip("numpy")
    from fatbench.methods.partitions import unequal_shards

    shard = {"CIFAR-10": 49_000 // 50, "SVHN": 72_257 // 50}
    want = {"K=5 6000-13000": (6, 13), "K=10 1000-8000": (1, 8), "K=5 5860-26370": (4, 18), "K=10 1465-13185": (1, 9)}
    for split, settings in {c.key["split"]: c.spec["partition"] for c in plan("sfat-unequal").cells}.items():
        dataset, _, rest = split.partition(" ")
        labels = numpy.arange(49_000 if dataset == "CIFAR-10" else 72_257) % 10
        keywords = {key: value for key, value in settings.items() if key != "name"}
        sizes = [len(part) for part in unequal_shards(labels, numpy.random.default_rng(0), None, **keywords)]
        if rest in want:
            assert (min(sizes), max(sizes)) == tuple(n * shard[dataset] for n in want[rest])
        else:
            assert (min(sizes), max(sizes)) == (50, 16_700)


# --- the published numbers ----------------------------------------------------------------------------------------

REPEATS = {"T3-variants", "T3-5-clients", "audit", "T11-variants"}  # show published numbers of other tables again
# Which tables show which file.
EXPECTED = {
    "sfat-t1.csv": {("sfat-clients", "T1")},
    "sfat-t2.csv": {("sfat-local-methods", "T2")},
    "sfat-t3.csv": {
        *((name, table) for name in SETTINGS for table in ("T3", "T3-variants")),
        ("sfat-cifar100", "T3-5-clients"), ("sfat-audit", "audit"),
    },
    "sfat-t5.csv": {("sfat-strength", "T5")},
    "sfat-t7.csv": {("sfat-per-client", "T7")},
    "sfat-t8.csv": {("sfat-per-client", table) for table in ("T8-train", "T8-test", "T8-gap")},
    "sfat-t9.csv": {("sfat-local-epochs", "T9")},
    "sfat-t10.csv": {("sfat-reverse", "T10")},
    "sfat-t11.csv": {("sfat-softbetter", "T11"), ("sfat-softbetter", "T11-variants")},
    "sfat-t12.csv": {("sfat-anneal", "T12")},
    "sfat-t13.csv": {("sfat-drift", "T13")},
    "sfat-t14.csv": {("sfat-drift", "T14")},
    "sfat-t15.csv": {("sfat-mu", "T15")},
    "sfat-t16.csv": {("sfat-clients", "T16")},
    "sfat-t17.csv": {("sfat-unequal", "T17")},
    "sfat-t18.csv": {("sfat-unequal", "T18")},
    "sfat-t19.csv": {("sfat-celeba", "T19")},
    "sfat-t20.csv": {("sfat-participation", "T20-natural"), ("sfat-participation", "T20-pgd20")},
    "sfat-t21.csv": {(name, "T21") for name in SETTINGS},
}  # fmt: skip
# Columns that say what a row is, and Table 12's r, which the method and the data set determine.
KEYS = {"dataset", "optimizer", "method", "K", "local", "eps_train", "metric", "E", "r", "mu", "sizes", "flag"}


@cache
def _csv(file: Path) -> list[dict[str, str]]:
    with file.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


Hit = tuple[int, str, str]  # row of the file, column, text


def published(table: Table, point: dict[str, str]) -> dict[str, list[Hit]]:
    """heading -> the CSV fields that the mapping of docs/suites.md finds for a grid point."""
    source = table.published

    def theirs(label: str) -> str:
        return source.labels.get(label, label)

    rows = [
        (index, row)
        for index, row in enumerate(_csv(source.file))
        if all(row[column] == value for column, value in source.match.items())
        and all(row[column] == theirs(point[axis]) for axis, column in source.rows.items())
    ]
    found = {}
    for heading in source.values:
        hits = []
        for columns in (source.values, source.std):
            if heading in columns:
                column = re.sub(r"\{(.+?)\}", lambda match: theirs(point[match[1]]), columns[heading])
                hits += [(index, column, row[column]) for index, row in rows]
        found[heading] = hits
    return found


def _tables() -> Iterator[tuple[str, Table]]:
    for name in OURS:
        for table in read(name).tables:
            if table.published is not None:
                yield name, table


@pytest.mark.parametrize("name", OURS)
def test_every_row_of_a_table_finds_its_published_numbers(name: str) -> None:
    for table in (table for of, table in _tables() if of == name):
        for point in points(table, plan(name)):
            found = published(table, point)
            if point.get("method") == "FAT shrunk":  # a control that no paper has
                assert not any(found.values())
                continue
            for heading, hits in found.items():
                fields = 1 + (heading in table.published.std)
                assert len(hits) == fields, f"{table.id}: {point}: {heading}: {hits}"
                assert all(float(text) >= 0 for _, _, text in hits), f"{table.id}: {point}: {heading}: {hits}"


def test_every_published_number_is_shown_where_it_is_meant_to_be() -> None:
    """No field of any sfat-t*.csv is left out, and none turns up in another table."""
    shown: dict[str, dict[tuple[int, str], set[tuple[str, str]]]] = {}
    for name, table in _tables():
        for point in points(table, plan(name)):
            for hits in published(table, point).values():
                for index, column, text in hits:
                    if text:
                        fields = shown.setdefault(table.published.file.name, {})
                        fields.setdefault((index, column), set()).add((name, table.id))
    files = sorted((FOLDER / "published").glob("sfat-t*.csv"))
    assert {file.name for file in files} == set(EXPECTED) == set(shown)
    for file in files:
        every = {
            (index, column)
            for index, row in enumerate(_csv(file))
            for column, text in row.items()
            if text and column not in KEYS
        }
        assert set(shown[file.name]) == every, file.name
        assert {place for places in shown[file.name].values() for place in places} == EXPECTED[file.name]
        for field, places in shown[file.name].items():
            assert len([table for _, table in places if table not in REPEATS]) == 1, (file.name, field, places)


@pytest.mark.parametrize(
    ("name", "id", "point", "heading", "text"),
    [
        ("sfat-cifar10", "T3", {"optimizer": "SCAFFOLD", "method": "SFAT"}, "AA", ["33.32", "0.01"]),
        ("sfat-cifar10", "T3-variants", {"optimizer": "FedProx (squared)", "method": "FAT"}, "CW", ["31.65", "0.36"]),
        ("sfat-cifar10", "T21", {"optimizer": "Centralized", "method": "AT", "partition": "IID"}, "PGD-20", ["38.18"]),
        ("sfat-cifar10", "T21", {"optimizer": "FedProx", "method": "SFAT", "partition": "Non-IID"}, "AA", ["31.98"]),
        ("sfat-cifar100", "T3-5-clients", {"optimizer": "FedAvg", "method": "SFAT"}, "natural", ["35.65", "0.54"]),
        ("sfat-svhn", "T3", {"optimizer": "FedAvg", "method": "FAT"}, "FGSM (released)", ["88.13", "0.18"]),
        ("sfat-audit", "audit", {"dataset": "SVHN", "method": "SFAT (released weights)"}, "PGD-20", ["72.04", "0.32"]),
        ("sfat-clients", "T16", {"dataset": "CIFAR-100", "clients": "25", "method": "FAT"}, "CW", ["13.23"]),
        ("sfat-clients", "T1", {"clients": "50", "method": "SFAT"}, "PGD-20", ["34.35"]),
        ("sfat-strength", "T5", {"dataset": "SVHN", "eps": "1/255"}, "gap", ["4.65"]),
        ("sfat-per-client", "T8-gap", {"method": "SFAT"}, "client 3", ["20.17"]),
        ("sfat-local-epochs", "T9", {"dataset": "SVHN", "E": "1", "method": "SFAT"}, "CW", ["71.05"]),
        ("sfat-reverse", "T10", {"dataset": "CIFAR-10", "r": "0.6"}, "FGSM (released)", ["28.81"]),
        ("sfat-anneal", "T12", {"dataset": "SVHN", "method": "SFAT-annealed"}, "natural", ["91.68"]),
        ("sfat-drift", "T14", {"optimizer": "FedProx", "method": "SFAT"}, "70", ["9.06"]),
        ("sfat-unequal", "T18", {"split": "SVHN K=10 50-16700", "optimizer": "FedProx", "method": "FAT"}, "CW",
         ["70.90"]),
        ("sfat-participation", "T20-pgd20", {"participation": "0.4", "method": "SFAT"}, "PGD-20", ["73.01"]),
    ],
)  # fmt: skip
def test_published_numbers(name: str, id: str, point: dict[str, str], heading: str, text: list[str]) -> None:
    """Read off the paper's tables by hand."""
    table = next(t for t in read(name).tables if t.id == id)
    assert [found for _, _, found in published(table, point)[heading]] == text


def test_fgsm_compares_with_the_released_attack_only_and_only_distances_are_plain_numbers() -> None:
    for name, table in _tables():
        assert "FGSM" not in table.published.values, name
        if "FGSM (released)" in table.published.values:
            assert (table.values["FGSM (released)"], table.values["FGSM"]) == ("fgsm_sfat", "fgsm")
    assert {table.id for _, table in _tables() if table.published.unit == "plain"} == {"T13", "T14"}


SELECTED = dict.fromkeys(("sfat", "fat-transformers", "fedvkd"), "best-test") | dict.fromkeys(("adfl", "april"), "last")


def test_every_published_number_says_of_which_round_it_is() -> None:
    """The checkpoints of the five papers (differences: test-selection); Tables 7 and 8 of SFAT do not say."""
    for name in files.available():
        suite = files.load(name)
        for shown in (one for one in (*suite.tables, *suite.figures) if one.published is not None):
            sources = [Source.parse(shown.headings[heading].source) for heading in shown.published.values]
            if not any(source.checkpoint("best-test") for source in sources):
                continue
            paper = next(paper for paper in SELECTED if name.startswith(paper))
            assert "select" in shown.published.model_fields_set, (name, shown.id)
            unknown = shown.published.file.name in ("sfat-t7.csv", "sfat-t8.csv")
            assert shown.published.select == ("unknown" if unknown else SELECTED[paper]), (name, shown.id)


# --- how suite files are read -------------------------------------------------------------------------------------

TINY = """\
name: s
title: A suite
seeds: [6]
base:
  data: {name: cifar10}
  validation: 1000
  partition: {name: shah, clients: 5}
  model: {name: nin}
  algorithm:
    name: fedavg
    rounds: 2
    local:
      epochs: 1
      batch: 32
      lr: 0.01
      objective: {name: at, attack: {name: pgd, eps: 8/255, step: 2/255, steps: 10}}
    aggregator: {name: sfat, alpha: 1/6, top: 1}
  monitor: {name: pgd, eps: 8/255, step: 2/255, steps: 20}
axes:
  E:
    one: {}
    two: {algorithm: {local: {epochs: 2}}}
  K:
    five: {}
    ten: {partition: {clients: 10}}
grid:
  product: [E, K]
evaluate:
  checkpoints: [last]
  attacks:
    pgd20: {name: pgd, eps: 8/255, step: 2/255, steps: 20}
presets:
  paper: {}
  smoke: {note: small, axes: {E: [one]}}
tables:
  - id: T
    title: A table
    rows: [E]
    across: [K]
    values: {PGD-20: pgd20}
"""


@pytest.fixture
def suite_from(tmp_path: Path) -> Callable[..., Suite]:
    """A suite from TINY with pieces of its text replaced."""

    def make(*changes: tuple[str, str], name: str = "s.yaml") -> Suite:
        text = TINY
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in TINY"
            text = text.replace(old, new)
        (tmp_path / name).write_text(text, encoding="utf-8")
        return load(str(tmp_path / name))

    return make


@pytest.fixture
def message(suite_from: Callable[..., Suite], tmp_path: Path) -> Callable[..., str]:
    """The message with which TINY, changed, is refused; the folder's name left out."""

    def fail(*changes: tuple[str, str], preset: str = "paper") -> str:
        with pytest.raises(SpecError) as caught:
            suite_from(*changes).plan(preset)
        assert caught.value.exit_code == 2
        return str(caught.value).replace(f"{tmp_path}{os.sep}", "")

    return fail


def keys(plan: Plan) -> list[str]:
    return [" ".join(c.key.values()) for c in plan.cells]


def test_axes_patch_the_base_and_points_come_in_their_order(suite_from: Callable[..., Suite]) -> None:
    plan = suite_from().plan()
    patched = [(c.spec["algorithm"]["local"]["epochs"], c.spec["partition"]["clients"]) for c in plan.cells]
    points = ["one five", "one ten", "two five", "two ten"]
    assert (keys(plan), patched) == (points, [(1, 5), (1, 10), (2, 5), (2, 10)])
    assert keys(suite_from(("product: [E, K]", "product: [K, E]")).plan()) == points
    same = suite_from(("ten: {partition: {clients: 10}}", "ten: {}")).plan()
    assert (len(same.cells), len(same.unique())) == (4, 2)  # one experiment is run once


def test_include_takes_lists_and_adds_to_the_product_and_exclude_says_why(suite_from: Callable[..., Suite]) -> None:
    only = suite_from(("product: [E, K]", "product: []\n  include: [{E: [one, two], K: ten}, {E: one, K: ten}]"))
    assert keys(only.plan()) == ["one ten", "two ten"]
    assert keys(only.plan("smoke")) == ["one ten"]
    more = suite_from(("product: [E, K]", "product: [E]\n  include: [{E: one, K: ten}]"))
    assert keys(more.plan()) == ["one", "one ten", "two"]
    of_preset = suite_from(("axes: {E: [one]}}", "axes: {E: [one]}, include: [{E: two, K: [ten]}, {E: one, K: ten}]}"))
    assert keys(of_preset.plan("smoke")) == ["one five", "one ten", "two ten"] and len(of_preset.plan().cells) == 4
    less = suite_from(("product: [E, K]", "exclude: [{when: {E: two, K: [ten]}, reason: too dear}]")).plan()
    assert keys(less) == ["one five", "one ten", "two five"]
    assert less.excluded == [({"E": "two", "K": "ten"}, "too dear")]


def trainings(suite: Suite, preset: str = "paper") -> list[tuple[int, float]]:
    locals = [c.spec["algorithm"]["local"] for c in suite.plan(preset).cells]
    return [(local["epochs"], local["lr"]) for local in locals]


def test_overrides_come_after_the_axes_and_the_last_one_wins(suite_from: Callable[..., Suite], tmp_path: Path) -> None:
    """The `set` of a preset is inherited, and comes between the axes and the overrides."""
    grid = (
        "\n  overrides:\n    - {set: {algorithm: {local: {lr: 0.1}}}}"
        "\n    - {when: {E: two}, set: {algorithm: {local: {epochs: 3, lr: 0.2}}}}"
    )
    last = "overrides: [{when: {E: two, K: ten}, set: {algorithm: {local: {epochs: 4}}}}]}"
    suite = suite_from(("product: [E, K]", f"product: [E, K]{grid}"), ("axes: {E: [one]}}", last))
    assert trainings(suite) == [(1, 0.1), (1, 0.1), (3, 0.2), (3, 0.2)]
    assert trainings(suite, "smoke") == [(1, 0.1), (1, 0.1), (3, 0.2), (4, 0.2)]
    suite_from(("axes: {E: [one]}}", "set: {test: 60, algorithm: {local: {epochs: 5, lr: 0.3}}}}"))
    smoke = (
        "set: {algorithm: {local: {lr: 0.4}}}, overrides: [{when: {E: two}, set: {algorithm: {local: {epochs: 4}}}}]"
    )
    text = f"name: child\ntitle: A child\nextends: s.yaml\npresets: {{smoke: {{{smoke}}}}}\n"
    (tmp_path / "child.yaml").write_text(text)
    child = load(str(tmp_path / "child.yaml"))
    assert trainings(child, "smoke") == [(5, 0.4), (5, 0.4), (4, 0.4), (4, 0.4)]
    assert {c.spec["test"] for c in child.plan("smoke").cells} == {60}


def test_a_call_of_another_name_replaces_the_whole(suite_from: Callable[..., Suite]) -> None:
    released = "two: {algorithm: {aggregator: {name: sfat_released, r: 1.4, top: 1}}}"
    suite = suite_from(("two: {algorithm: {local: {epochs: 2}}}", released))
    aggregators = [short("Aggregator", c.spec["algorithm"]["aggregator"]) for c in suite.plan().cells]
    assert aggregators[0] == {"name": "sfat", "alpha": "1/6", "top": 1}
    assert aggregators[2] == {"name": "sfat_released", "r": 1.4, "top": 1}


def test_evaluation_can_depend_on_the_axes_and_a_preset_takes_an_attack_out(suite_from: Callable[..., Suite]) -> None:
    change = ("  checkpoints: [last]\n", "  overrides: [{when: {E: two}, set: {attacks: {pgd20: {eps: 4/255}}}}]\n")
    plan = suite_from(change).plan()
    assert [c.evaluations[0].attack["eps"] for c in plan.cells] == ["8/255", "8/255", "4/255", "4/255"]
    assert plan.metrics() == ["pgd20"]
    smoke = "{note: small, evaluate: {attacks: {pgd20: null, fgsm: {name: fgsm, eps: 8/255}}},"
    suite = suite_from(("{note: small,", smoke))
    assert (suite.plan().metrics(), suite.plan("smoke").metrics()) == (["pgd20"], ["fgsm"])


def test_attacks_can_be_added_to_a_preset_that_does_without() -> None:
    """`--attack`: as the suite describes them, else at the radius of its other attacks; no cell is another for it."""
    every = ("fgsm", "pgd20", "cw", "autoattack")
    radii = {"sfat-mu": ("4/255", "1/255"), "fat-transformers-iid": ("8/255", "2/255"), "adfl-mnist": (0.1, 0.025)}
    for name, (eps, step) in radii.items():
        plain, more = plan(name), read(name).plan("paper", attacks=every)
        assert (more.added, [c.id for c in more.cells]) == (every, [c.id for c in plain.cells])
        for one, other in zip(plain.cells, more.cells, strict=True):
            assert {e.id for e in one.evaluations} <= {e.id for e in other.evaluations}
            assert {e.label for e in other.evaluations} == {*every, *(e.label for e in one.evaluations)}
            assert {e.attack["eps"] for e in other.evaluations if e.label in every} == {eps}
            assert {e.attack["step"] for e in other.evaluations if e.label in ("pgd20", "cw")} == {step}
    quick = read("sfat-mu").plan("smoke", attacks=["autoattack"]).cells[0]
    assert {e.label: e.n for e in quick.evaluations}["autoattack"] == 64  # as many images as the preset's others
    own = read("sfat-mu").plan("smoke", attacks=["{name: pgd, steps: 3, step: 1/255}", "far={name: fgsm, eps: 16/255}"])
    found = {e.label: e.attack["eps"] for e in own.cells[0].evaluations if e.added}
    assert (own.added, found) == (("pgd3", "far"), {"pgd3": "4/255", "far": "16/255"})
    for name, attack, said in (
        ("sfat-mu", "natural={name: fgsm}", r"the suite has an attack 'natural': name yours, NAME=\{name: "),
        ("sfat-mu", "pgd02", r"no attack is named 'pgd02' \(did you mean 'pgd20'\?\)"),
        ("april-masks", "fgsm", "suite 'april-masks', preset 'paper', evaluates no model on test"),
    ):
        with pytest.raises(SpecError, match=f"^attacks: {said}"):
            read(name).plan("paper", attacks=[attack])


@pytest.mark.nightly
@pytest.mark.parametrize("preset", ["paper", "quick"])
def test_all_four_attacks_can_be_added_to_every_suite(preset: str) -> None:
    """But where AutoAttack needs more classes, and where no model is evaluated; at each point with one radius."""
    every = ("fgsm", "pgd20", "cw", "autoattack")
    for name in NAMES:
        plain = plan(name, preset)
        if name in ("sfat-celeba", "sfat-plane"):
            with pytest.raises(SpecError, match="AutoAttack's targeted losses need at least 4 classes"):
                read(name).plan(preset, attacks=every)
        elif plain.metrics():
            for cell in read(name).plan(preset, attacks=every).cells:
                found = {e.label: e.attack["eps"] for e in cell.evaluations if e.label in every}
                assert {*found} in ({*every}, set()), name
                assert len(set(found.values())) < 2, name


def test_seeds(suite_from: Callable[..., Suite]) -> None:
    suite = suite_from(("seeds: [6]", 'seeds: "0-2"'))
    assert [c.spec["seed"] for c in suite.plan().cells][:3] == [0, 1, 2]
    assert {c.spec["seed"] for c in suite.plan("paper", seeds=[9]).cells} == {9}
    assert parse_seeds("0-2,7, 1") == [0, 1, 2, 7]


def test_identity_ignores_defaults_and_how_a_suite_is_written(suite_from: Callable[..., Suite]) -> None:
    ids = [c.id for c in suite_from().plan().cells]
    momentum = ("      lr: 0.01\n", "      momentum: 0.0\n      lr: 0.01\n")
    spelt = suite_from(("clients: 5}", "skew: 2.0, clients: 5}"), momentum)
    assert [c.id for c in spelt.plan().cells] == ids
    assert [c.id for c in suite_from(("alpha: 1/6", "alpha: 0.1667")).plan().cells] != ids
    evaluated = suite_from(("steps: 20}\npresets", "steps: 20}\n    fgsm: {name: fgsm, eps: 8/255}\npresets"))
    assert [c.id for c in evaluated.plan().cells] == ids


def test_extends_merges_and_keeps_lines(
    suite_from: Callable[..., Suite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    suite_from()
    child = tmp_path / "child.yaml"
    text = "name: child\ntitle: A child\nextends: s\nbase: {algorithm: {rounds: 7}}\n"
    child.write_text(f"{text}axes: {{K: {{two: {{partition: {{clients: 2}}}}}}}}\n")
    with pytest.raises(SpecError, match="no suite is named 's'"):
        load(str(child))  # by name only where suites are looked for; beside it, by file
    monkeypatch.chdir(tmp_path)
    assert load("s").file.name == "s.yaml"  # one's own, in the working directory
    child.write_text(child.read_text().replace("extends: s\n", "extends: s.yaml\n"))
    plan = load(str(child)).plan()
    assert keys(plan) == ["one five", "one ten", "one two", "two five", "two ten", "two two"]
    assert {c.spec["algorithm"]["rounds"] for c in plan.cells} == {7}
    child.write_text(child.read_text().replace("clients: 2", "clients: two"))
    with pytest.raises(SpecError) as caught:
        load(str(child)).plan()
    assert str(caught.value) == f"{child}:5: clients: should be a valid integer, got 'two'"


def test_filters(suite_from: Callable[..., Suite]) -> None:
    suite = suite_from()
    assert keys(suite.plan(where="E=two and not K=five")) == ["two ten"]
    assert keys(suite.plan(where="clients>5 or epochs=2")) == ["one ten", "two five", "two ten"]
    assert len(suite.plan(where="aggregator=sfat and model=nin").cells) == 4
    for text, never in [
        ("model=resnet18", ": model is never 'resnet18' (known: nin)"),
        ("E=one and K=fiv", ": K is never 'fiv' (did you mean 'five'?)"),
        ("E=one and E=two", ""),
        ("clients>99", ""),
    ]:
        with pytest.raises(NothingMatched) as nothing:
            suite.plan(where=text)
        assert nothing.value.at_terminal() == f"-k '{text}' matches none of the 4 cells of 's'{never}"
    example = " (write for example: model=nin and method in [FAT, 'SFAT (released)'])"
    for text, said in [
        ("modle=nin", "no cell has 'modle' (did you mean 'model'?)"),
        ("model", f"expected name=value at 'model' in 'model'{example}"),
        ("(E=one", f"a ')' is missing in '(E=one'{example}"),
        ("E=one K=five", f"unexpected 'K' in 'E=one K=five': a value with spaces or brackets needs quotes{example}"),
    ]:
        with pytest.raises(SpecError) as caught:
            suite.plan(where=text)
        assert caught.value.at_terminal() == f"-k: {said}"


# --- bad input ----------------------------------------------------------------------------------------------------

FIGURE = (
    "    values: {PGD-20: pgd20}\n",
    "    values: {PGD-20: pgd20}\nfigures:\n  - id: F\n    title: A figure\n    panels: [K]\n    lines: [E]\n"
    "    series: {natural: 'train:natural'}\n",
)


def test_figures_are_read(suite_from: Callable[..., Suite]) -> None:
    """Defaults, the pseudo-axis `series`, and what is only known once the grid is: one point to a line, one unit."""
    figure = suite_from(FIGURE).figures[0]
    assert (figure.kind, figure.panels, figure.lines, figure.scale, figure.conditions) == (
        "lines", ["K"], ["E"], "linear", {},
    )  # fmt: skip
    assert figure.series == {"natural": "train:natural"}
    two = ("series: {natural: 'train:natural'}", "series: {loss: 'train:natural_loss', natural: 'train:natural'}")
    lumped = "figure F: a line shows more than one point of the grid: name the axis E in 'panels', 'lines' or 'where'"
    mixed = "figure F: natural in per cent and loss share a panel: make two figures, or add 'series' to 'panels'"
    for change, said in [(("    lines: [E]\n", ""), lumped), (two, mixed)]:
        wrong = suite_from((FIGURE[0], FIGURE[1].replace(*change)))
        with pytest.raises(SpecError) as caught:
            report.check(wrong, wrong.plan())
        assert str(caught.value) == f"{wrong.file}: {said} (paper)"
    apart = suite_from((FIGURE[0], FIGURE[1].replace(*two).replace("panels: [K]", "panels: [K, series]")))
    report.check(apart, apart.plan())
    without = FIGURE[1].replace("    lines: [E]\n", "")
    picked = suite_from((FIGURE[0], without.replace("'train:natural'", "{source: 'train:natural', where: {E: two}}")))
    report.check(picked, picked.plan())
    assert picked.figures[0].conditions == {"natural": {"E": ["two"]}}
    with pytest.raises(SpecError, match=r"s\.yaml:47: id: two figures have the id 'F'"):
        suite_from((FIGURE[0], FIGURE[1] + "  - {id: F, title: Again, series: {natural: 'train:natural'}}\n"))


AUTO = ("{name: pgd, eps: 8/255, step: 2/255, steps: 20}\npresets", "{name: autoattack, eps: 8/255}\npresets")
CENTRALIZED = (
    ("    name: fedavg\n    rounds: 2\n    local:\n      epochs: 1\n",
     "    name: centralized\n    rounds: 2\n    local:\n"),
    ("    aggregator: {name: sfat, alpha: 1/6, top: 1}\n", ""),
    ("two: {algorithm: {local: {epochs: 2}}}", "two: {}"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("checkpoint best-val needs held-out images: set 'validation: N'",
         [("  validation: 1000\n", ""), ("checkpoints: [last]", "checkpoints: [best-val]")]),
        ("checkpoints last, best-test need 'monitor', an attack run during training",
         [("  monitor: {name: pgd, eps: 8/255, step: 2/255, steps: 20}\n", ""),
          ("checkpoints: [last]", "checkpoints: [last, best-test]")]),
        ("evaluate: pgd20: AutoAttack's targeted losses need at least 4 classes, celeba has 2",
         [("data: {name: cifar10}", "data: {name: celeba}"), AUTO]),
        ("algorithm: centralized needs 'partition: {name: iid, clients: 1}'", CENTRALIZED),
    ],
    ids=["best-val", "best-test", "autoattack", "centralized"],
)  # fmt: skip
def test_refused_in_combination(message: Callable[..., str], said: str, changes: list[tuple[str, str]]) -> None:
    assert message(*changes) == f"s.yaml: E=one, K=five (paper): {said}"


def test_a_misspelt_axis_of_a_child_is_no_new_axis(tmp_path: Path) -> None:
    """A new axis with one label would be silently in every cell, under the parent's identity or another."""
    child = "name: s\ntitle: s\nextends: sfat-cifar10\naxes: {metod: {mine: {}}}\n"
    (tmp_path / "s.yaml").write_text(child)
    with pytest.raises(SpecError, match=r"s.yaml:4: metod: no axis of .*did you mean 'method'"):
        load(str(tmp_path / "s.yaml"))


def test_files_that_are_no_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.yaml").mkdir()
    yaml = "invalid YAML: mapping values are not allowed here (a value with a colon needs quotes)"
    imported = "(results are read by fatbench import rows.jsonl.xz, and then by the name of their suite)"
    for file, content, said in [
        ("none.yaml", None, "none.yaml: no such suite file"),
        ("folder.yaml", None, "folder.yaml: no such suite file"),
        ("list.yaml", b"- name: s\n", "list.yaml: expected a mapping at the top level"),
        ("empty.yaml", b"", "empty.yaml: expected a mapping at the top level"),
        ("latin.yaml", b"name: caf\xe9\n", "latin.yaml is not a suite file: it is not UTF-8 text"),
        ("rows.jsonl.xz", b"\xfd7zXZ", f"rows.jsonl.xz is not a suite file {imported}"),
        ("./my.db", b"SQLite format 3\0\xfb",
         "my.db is not a suite file: it is not UTF-8 text (a database is named with --db my.db)"),
        ("colon.yaml", b"title: Our group: my rule\n", f"colon.yaml:1: {yaml}"),
        ("short.yaml", b"name: short\n", "short.yaml: 'title' is missing"),
        ("sfat-cifar01", None, "no suite is named 'sfat-cifar01' (did you mean 'sfat-cifar10'?)"),
    ]:  # fmt: skip
        if content is not None:
            Path(file).write_bytes(content)
        with pytest.raises(SpecError) as caught:
            load(file)
        assert str(caught.value) == said


def test_fewer_images_for_one_attack(tmp_path: Path) -> None:
    """`limit` bounds one attack's images: min(n, fewer) of it, n of the others; a name that is no attack is refused."""
    attacks = "{natural: natural, pgd20: {name: pgd, eps: 8/255, step: 2/255, steps: 20}}"
    evaluate = f"{{n: 100, limit: {{pgd20: 40}}, attacks: {attacks}}}"
    text = small(name="few", evaluate=evaluate, presets="{paper: {}, smoke: {evaluate: {n: 8}}}")
    file = tmp_path / "few.yaml"
    file.write_text(text)
    found = load(str(file))
    assert [(e.label, e.n) for e in found.plan().cells[0].evaluations] == [("natural", 100), ("pgd20", 40)]
    assert [(e.label, e.n) for e in found.plan("smoke").cells[0].evaluations] == [("natural", 8), ("pgd20", 8)]
    for wrong, said in (
        ("{pgd2: 40}", r"pgd2: no attack is named 'pgd2' \(did you mean 'pgd20'\?\)"),
        ("{pgd20: 0}", "pgd20: expected a number of test images, got 0"),
    ):
        file.write_text(text.replace("{pgd20: 40}", wrong))
        with pytest.raises(SpecError, match=rf"few\.yaml:11: {said}"):
            load(str(file)).plan()


GRID = "product: [E, K]\n  include: [{E: one}]\n  exclude: [{when: {E: two}, reason: no}]\n  overrides: []\n"
MORE = "    where: {E: one}\n    best: max\n    paired: {axis: K, against: five}\n"
SMALL = "{note: small, base: {}, overrides: [{when: {E: one}, set: {}}], evaluate: {n: 3},"
ODD = (None, True, 3, 2.5, "odd", [], [3], ["odd"], {}, {"odd": 1}, [{"odd": 1}], [[]])
