"""The perturbation of a task reaches every attack that states no radius, and a further method of any suite of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from test_suites import QUICKLY

from fatbench import report
from fatbench.errors import SpecError
from fatbench.suite import files, folders, signatures, source_files, trees
from fatbench.suite.cells import Cell, Plan

PLUGIN = '''
from fatbench.engine.rounds import Mixing


def further(updates, context):
    """A further aggregator: the plain mean."""
    return Mixing([1 / len(updates)] * len(updates))


AGGREGATORS = {"further": further}
'''
SUITE = """
name: own
title: Own
seeds: [0]
base:
  data: digits
  perturbation: {eps: 8/255, training: {step: 2/255, steps: 7}}
  partition: {name: iid, clients: 3}
  model: small_cnn
  algorithm:
    name: fedavg
    rounds: 2
    local: {epochs: 1, batch: 8, lr: 0.1, objective: {name: at, attack: {name: pgd}}}
    aggregator: samples
  monitor: {name: pgd, step: 1/255, steps: 3}
axes:
  data: {grey: {perturbation: {eps: 25/255, training: {step: 6/255}}}, colour: {}}
  method:
    FAT: {}
    TRADES: {algorithm: {local: {objective: {name: trades, attack: pgd_kl}}}}
    RS: {algorithm: {local: {objective: {attack: {step: 10/255, steps: 1}}}}}
    N-FGSM: {algorithm: {local: {objective: n_fgsm_at}}}
    strong: {algorithm: {local: {objective: {attack: {eps: 0.2}}}}}
baseline: FAT
evaluate:
  attacks:
    natural: natural
    fgsm: fgsm
    far: {name: fgsm, eps: 0.3}
    pgd: {name: pgd, eps: [1/255, 2/255], step: 1/255, steps: 2}
presets: {paper: {}, fast: {set: {perturbation: {training: {steps: 1}}}}}
tables: [{id: t, title: T, rows: [data, method], values: {natural: natural, FGSM: fgsm}}]
"""


@pytest.fixture
def own(tmp_path: Path) -> Callable[..., Plan]:
    def plan(*changes: tuple[str, str], preset: str = "paper", attacks: tuple[str, ...] = ()) -> Plan:
        text = SUITE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "own.yaml").write_text(text)
        return files.load(str(tmp_path / "own.yaml")).plan(preset, attacks=attacks)

    return plan


def attack(cell: Cell) -> Mapping[str, Any]:
    objective = cell.spec["algorithm"]["local"]["objective"]
    return objective.get("attack") or objective


def test_every_attack_that_states_no_radius_has_that_of_its_task(own: Callable[..., Plan]) -> None:
    cells = {tuple(cell.key.values()): cell for cell in own().cells}
    trained = {key: tuple(attack(cell).get(k) for k in ("eps", "step", "steps")) for key, cell in cells.items()}
    for data, eps, step in (("grey", "25/255", "6/255"), ("colour", "8/255", "2/255")):
        assert {method: said for (of, method), said in trained.items() if of == data} == {
            "FAT": (eps, step, 7), "TRADES": (eps, step, 7), "RS": (eps, "10/255", 1), "N-FGSM": (eps, None, None),
            "strong": (0.2, step, 7),
        }  # fmt: skip
    for (data, _), cell in cells.items():
        eps = {"grey": "25/255", "colour": "8/255"}[data]
        assert (cell.spec["monitor"]["eps"], cell.spec["monitor"]["step"]) == (eps, "1/255")  # `training` is not its
        measured = {e.label: e.attack.get("eps") for e in cell.evaluations}
        assert measured == {"natural": None, "fgsm": eps, "far": 0.3, "pgd_1_255": "1/255", "pgd_2_255": "2/255"}


def test_a_cell_is_the_same_whether_its_attacks_state_the_radius_or_the_task_does(own: Callable[..., Plan]) -> None:
    stated = own(
        ("  perturbation: {eps: 8/255, training: {step: 2/255, steps: 7}}\n", ""),
        ("attack: {name: pgd}}", "attack: {name: pgd, eps: 8/255, step: 2/255, steps: 7}}"),
        ("monitor: {name: pgd,", "monitor: {name: pgd, eps: 8/255,"),
        ("attack: pgd_kl", "attack: {name: pgd_kl, eps: 8/255, step: 2/255, steps: 7}"),
        ("objective: n_fgsm_at", "objective: {name: n_fgsm_at, eps: 8/255}"),
        ("fgsm: fgsm", "fgsm: {name: fgsm, eps: 8/255}"),
        ("{grey: {perturbation: {eps: 25/255, training: {step: 6/255}}}, colour: {}}", "{colour: {}}"),
    )
    of_task = own(("{grey: {perturbation: {eps: 25/255, training: {step: 6/255}}}, colour: {}}", "{colour: {}}"))
    assert stated.cells == of_task.cells


def test_a_preset_may_change_it_and_further_attacks_have_it(own: Callable[..., Plan]) -> None:
    steps = {cell.key["method"]: attack(cell).get("steps") for cell in own(preset="fast").cells}
    assert steps == {"FAT": 1, "TRADES": 1, "RS": 1, "N-FGSM": None, "strong": 1}
    for cell in own(attacks=("autoattack",)).cells:
        eps = {e.label: e.attack.get("eps") for e in cell.evaluations}
        assert eps["autoattack"] == eps["fgsm"]


def test_a_radius_in_l2(own: Callable[..., Plan]) -> None:
    plan = own(
        ("eps: 8/255, training", "norm: L2, eps: 1.5, training"),
        ("perturbation: {eps: 25/255,", "perturbation: {eps: 0.5,"),
        ("    TRADES: {algorithm: {local: {objective: {name: trades, attack: pgd_kl}}}}\n", ""),
        ("    N-FGSM: {algorithm: {local: {objective: n_fgsm_at}}}\n", ""),
        ("    fgsm: fgsm\n", "    fgsm: {name: fgsm, eps: 8/255}\n    aa: autoattack\n"),
    )
    of_fat = [attack(c) for c in plan.cells if c.key["method"] == "FAT"]
    assert [(one["norm"], one["eps"]) for one in of_fat] == [("L2", 0.5), ("L2", 1.5)]
    known = {e.label: e.attack for e in plan.cells[-1].evaluations}
    assert (known["aa"]["norm"], known["aa"]["eps"], known["fgsm"]["eps"]) == ("L2", 1.5, "8/255")
    assert {c.spec["monitor"]["norm"] for c in plan.cells} == {"L2"}


# --- a further method ------------------------------------------------------------------------------------------------


def plain(node: Any) -> Any:
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items()}
    return [plain(value) for value in node] if isinstance(node, list) else node


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    file = tmp_path_factory.mktemp("plugin") / "further.py"
    file.write_text(PLUGIN)
    yield file
    source_files.delete(*signatures.plugins())
    signatures.drop_plugins(list(signatures.plugins()))


def with_further(name: str, plugin: Path, folder: Path) -> tuple[files.Suite, str, str]:
    """A suite that extends one of ours by a method like its baseline, but for its aggregator: (it, axis, baseline)."""
    contents = files.load(name).contents
    assert contents.baseline is not None
    axis, baseline = contents.baseline
    label = plain(contents.axes[axis][baseline])
    first = next(cell for cell in files.load(name).plan(refuse=False).cells if cell.key.get(axis) == baseline)
    if "aggregator" in first.spec["algorithm"]:
        label["algorithm"] = {**label.get("algorithm", {}), "aggregator": {"name": "further"}}
    child: dict[str, Any] = {"name": "own", "extends": name, "plugins": [str(plugin)], "axes": {axis: {"own": label}}}
    if contents.grid.include:  # points that are named one by one: the further method beside its baseline
        points = [dict(point) for point in contents.grid.include]
        wider = [{**p, axis: [*p[axis], "own"]} if baseline in p.get(axis, ()) else p for p in points]
        child["grid"] = {"product": contents.grid.product or [], "include": wider}
    (folder / "own.yaml").write_text(yaml.safe_dump(child))
    return files.load(str(folder / "own.yaml")), axis, baseline


def settings(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from settings(value, f"{path}.{key}".lstrip("."))
    else:
        yield path, node


@pytest.mark.parametrize("name", QUICKLY)
def test_a_further_method_has_the_settings_of_the_baseline(name: str, plugin: Path, tmp_path: Path) -> None:
    if files.load(name).contents.baseline is None:
        return
    suite, axis, baseline = with_further(name, plugin, tmp_path)
    compared = 0
    for preset in suite.presets():
        plan = suite.plan(preset)
        by = {(*cell.key.items(), cell.spec["seed"]): cell for cell in plan.cells}
        for cell in plan.cells:
            other = by.get((*{**cell.key, axis: baseline}.items(), cell.spec["seed"]))
            if cell.key.get(axis) != "own" or other is None:
                continue
            mine, theirs = dict(settings(cell.spec)), dict(settings(other.spec))
            differ = {path for path in {*mine, *theirs} if mine.get(path) != theirs.get(path)}
            assert {p for p in differ if not p.startswith("algorithm.aggregator.")} == set(), (preset, cell.key)
            assert _evaluated(cell) == _evaluated(other)
            compared += 1
    assert compared


def _evaluated(cell: Cell) -> list[Any]:
    """What a cell is evaluated with; the model of another cell follows from the method, and so does the identity."""
    return [replace(e, origin=None) if e.origin else e for e in cell.evaluations]


def test_no_override_of_ours_hands_out_a_radius_to_names_of_methods() -> None:
    for file in [*folders.available().values(), *Path(folders.available()["sfat-audit"]).parent.glob("common/*.yaml")]:
        raw, _ = trees.read(file)
        lists = [*(raw.get("grid") or {}).get("overrides", ())]
        for preset in (raw.get("presets") or {}).values():
            lists += (preset or {}).get("overrides", ())
        for override in lists:
            radii = [path for path, _ in settings(override["set"]) if path.split(".")[-1] == "eps"]
            assert not radii or not {"method", "aggregator", "optimizer"} & {*(override.get("when") or {})}, override


# --- the grid of a suite that extends another ------------------------------------------------------------------------

GRID = "grid: {product: [data, method], overrides: [{when: {method: FAT}, set: {train: 90}}]}\n"
PARENT = SUITE.replace("evaluate:\n", f"{GRID}evaluate:\n")


@pytest.mark.parametrize(
    ("grid", "train", "points"),
    [
        ("{include: [{data: grey, method: [FAT, RS]}], product: []}", {"FAT": 90, "RS": None}, 2),
        ("{overrides: [{when: {method: RS}, set: {train: 60}}]}", {"FAT": 90, "RS": 60}, 10),
        ("{replace_overrides: true, overrides: [{when: {method: RS}, set: {train: 60}}]}", {"FAT": None, "RS": 60}, 10),
        ("{replace_overrides: true}", {"FAT": None, "RS": None}, 10),
        ("{exclude: [{when: {method: strong}, reason: no}]}", {"FAT": 90, "RS": None}, 8),
    ],
)
def test_a_grid_keeps_the_overrides_of_the_suite_it_extends(
    tmp_path: Path, grid: str, train: dict[str, int | None], points: int
) -> None:
    (tmp_path / "parent.yaml").write_text(PARENT)
    (tmp_path / "child.yaml").write_text(f"name: child\nextends: parent.yaml\ngrid: {grid}\n")
    cells = files.load(str(tmp_path / "child.yaml")).plan().cells
    assert len(cells) == points
    assert {c.key["method"]: c.spec["train"] for c in cells if c.key["method"] in ("FAT", "RS")} == train


def test_an_override_may_hold_for_the_cells_that_have_a_setting(tmp_path: Path) -> None:
    preset = "fast: {overrides: [{having: {algorithm.local.objective.name: [trades, n_fgsm_at]}, set: {train: 50}}]}"
    (tmp_path / "own.yaml").write_text(SUITE.replace("fast: {set: {perturbation: {training: {steps: 1}}}}", preset))
    cells = files.load(str(tmp_path / "own.yaml")).plan("fast").cells
    trained = {cell.key["method"]: cell.spec["train"] for cell in cells}
    assert trained == {"FAT": None, "TRADES": 50, "RS": None, "N-FGSM": 50, "strong": None}
    (tmp_path / "own.yaml").write_text(SUITE.replace("paper: {}", "paper: {overrides: [{having: {model: x}}]}"))
    with pytest.raises(SpecError, match=r"own.yaml:31: model: expected the path of a setting such as model.name"):
        files.load(str(tmp_path / "own.yaml"))


# --- malicious clients ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", ["{malicious: {clients: 2, attack: sign_flip}}", "{malicious: {attack: min_max}}"])
def test_an_adversary_of_ones_own_passes_every_preset_of_fat_byzantine(own: str, tmp_path: Path) -> None:
    (tmp_path / "byz.yaml").write_text(f"name: byz\nextends: fat-byzantine\naxes: {{adversary: {{own: {own}}}}}\n")
    suite = files.load(str(tmp_path / "byz.yaml"))
    found = {}
    for preset in suite.presets():
        cells = suite.plan(preset).cells
        assert all(cell.spec["malicious"] is None for cell in cells if cell.key["adversary"] == "none")
        found[preset] = {c.spec["malicious"]["clients"] for c in cells if c.key["adversary"] in ("own", "IPM 100")}
    stated = {4, 2} if "clients" in own else {4}
    assert found == {"paper": stated, "quick": stated, "cpu": {2}, "skew": {2}, "smoke": {1}}


def test_an_attack_that_a_suite_takes_out_is_missed_by_nothing_that_it_inherits(tmp_path: Path) -> None:
    text = "name: own\nextends: fat-baselines\nevaluate: {attacks: {autoattack: null, cw: null}}\n"
    (tmp_path / "own.yaml").write_text(text)
    suite = files.load(str(tmp_path / "own.yaml"))
    plans = [suite.plan(preset) for preset in suite.presets()]
    report.check_headings(suite, plans)
