"""What is known of a cell before it runs, and every refusal of an entry: each one is seen to refuse, under any name."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fatbench.errors import SpecError
from fatbench.models import MODELS, logit_parameters
from fatbench.suite import calls, cells, facts, signatures
from fatbench.suite.entry import Images, Unknown
from fatbench.suite.facts import Facts

LOCAL = {"batch": 32, "lr": 0.01, "objective": "standard"}
FEDAVG = {"name": "fedavg", "rounds": 2, "aggregator": "samples", "local": LOCAL}
BASE = {
    "seed": 0,
    "data": {"name": "digits"},
    "partition": {"name": "iid", "clients": 4},
    "model": {"name": "small_cnn"},
    "algorithm": FEDAVG,
    "monitor": {"name": "natural"},
}
VIT = {"name": "vit", "patch": 4, "dim": 12, "heads": 2, "depth": 2}
EDGE = {"name": "edge_vit", "patch": 4, "dim": 12, "heads": 2, "depth": 1}
SERVER = {"epochs": 1, "lr": 0.1}
SLACK = [
    {"name": "sfat", "alpha": 0.1}, {"name": "sfat_annealed", "alpha": 0.1}, {"name": "resfat_deemph", "r": 0.5},
    {"name": "resfat_up_large", "alpha": 0.1}, {"name": "sfat_released", "r": 1.2}, {"name": "fedavg_shrink", "r": 1.2},
]  # fmt: skip
SGD = {"batch": 1, "lr": 0.1, "objective": "standard"}
READERS = ["april", "april_opt", "patch_ls", "patch_span", "masked", "oracle"]
TWICE = {"name": "image_folder", "path": "nowhere", "size": 32}


def watched(**inversion) -> dict:
    call = {"name": "gradient_inversion", "rounds": 1, "objective": "standard", "defence": "none"}
    return {**call, "inversion": inversion}


def aggregated(aggregator, **more) -> dict:
    return {"algorithm": {**FEDAVG, **more, "aggregator": aggregator}}


def seen(model=VIT, size=32, **inversion) -> dict:
    return {"algorithm": watched(**inversion), "model": model, "size": size}


NEEDS = "needs a transformer with a patch embedding and learned positions: {name: vit}"
FEW = "images of 32 pixels are 64 unknown patches, and a model of width 12 gives a system of rank 12; use a wider model"
# (what is changed of BASE, the path of the call that refuses, how its reason begins)
CASES = [
    *[
        (aggregated({**aggregator, "top": 3}), "algorithm: aggregator", "top: 3 is more than half of the 4 ")
        for aggregator in SLACK
    ],
    *[
        (aggregated({"name": "two_level", "alpha": 0.1, "adversarial": 2, "top": top}, **more), "algorithm: aggregator",
            reason)
        for more, top, reason in (
            ({}, 2, "top: 2 is more than half of the 2 clients that train adversarially"),
            ({"name": "fedavg_mixed", "adversarial": 3, "standard": "standard"}, 1,
                "adversarial: 2 in the aggregator, 3 in the algorithm"),
        )
    ],
    *[
        ({"model": {"name": name}, "size": side, "train": 4 * 65, **more}, "model",
            f"{name}: a client's last batch has one example, which batch normalisation cannot train on at")
        for name, side, more in (
            ("resnet18", 8, {}),
            ("leaf_cnn", 8, {"partition": {"name": "shah", "clients": 4}}),
            ("efficientnet_lite0", 32, {"train": 4 * 86, "client_holdout": 0.25}),
        )
    ],
    ({"algorithm": {"name": "fltrust"}, "validation": 40}, "algorithm",
        "root: the server needs 100 images of its own, and 'validation' holds out 40"),
    *[
        ({"malicious": {"clients": many, "attack": attack}}, "malicious: attack", reason)
        for many, attack, reason in (
            (1, {"name": "badnets", "target": 10}, "target: class 10 of 10 classes"),
            (1, {"name": "feature_backdoor", "target": 10}, "target: class 10 of 10 classes"),
            (1, {"name": "feature_backdoor", "target": 0, "size": 8}, "size: a square of 8 pixels on images of 8 x 8"),
            (1, {"name": "badnets", "target": 0, "size": 8}, "size: a square of 8 pixels on images of 8 x 8"),
            (1, "alie", "z: 1 malicious clients of 4 give z <= 0, the honest mean"),
            (3, "alie", "z: the malicious clients are a majority"),
            (1, "fang_krum", "fang_krum needs 5 clients in a round, of whom 1 are malicious"),
            (1, {"name": "mimic_fixed", "client": 3}, "client: 3 of 3 honest clients in a round"),
            (1, "aimed", "aimed measures robust accuracy within the radius of training, and standard has no attack"),
        )
    ],
    *[
        ({"malicious": {"clients": 1, "attack": name, "knows": "own"}}, "malicious: attack", "knows: own: one")
        for name in ("alie", "min_max", "min_sum", "optimal_alie", "fang_krum", "fang_trimmed", "within_honest")
    ],
    *[
        (aggregated(aggregator), "algorithm: aggregator", reason)
        for aggregator, reason in (
            ({"name": "trimmed_mean", "byzantine": 2}, "byzantine: without 2 values at each end, none of 4 clients"),
            ({"name": "krum", "byzantine": 1}, "byzantine: Krum needs 5 clients"),
            ({"name": "multi_krum", "byzantine": 1}, "byzantine: Krum needs 5 clients in a round"),
            ({"name": "multi_krum", "byzantine": 0, "keep": 5}, "keep: 5 is more than the 4 clients"),
            ({"name": "bulyan", "byzantine": 1}, "byzantine: Bulyan needs 7 clients in a round"),
            *[({"name": name, "byzantine": 2}, "byzantine: 2 of 4 clients in a round: fewer than half may be malicious")
              for name in ("meamed", "mda", "smea", "caf", "dnc")],
            ({"name": "dnc", "byzantine": 1, "iterations": 4}, "dnc may drop 4 uploads, and 4 clients are in a round"),
            ({"name": "after", "pre": "bucketing", "aggregator": "afl"}, "afl treats clients by their numbers"),
            ({"name": "after", "pre": "bucketing", "aggregator": {"name": "caf", "byzantine": 1}},
                "2 uploads are made of 4: byzantine: 1 of 2 clients"),
        )
    ],
    *[
        ({"partition": {"name": "iid", "clients": 24}, **aggregated({"name": name, "byzantine": 11})},
            "algorithm: aggregator", "2,496,144 subsets without 11 of 24 clients, more than")
        for name in ("mda", "smea")
    ],
    *[
        (aggregated({"name": "after", "pre": {"name": name, "byzantine": 2}, "aggregator": "uniform"}),
            "algorithm: aggregator: pre", "byzantine: 2 of 4 clients in a round")
        for name in ("nnm", "arc")
    ],
    ({"partition": {"name": "shah", "clients": 4, "skew": 40}}, "partition", "skew: (clients - 1) * skew must be below "
        "100, got (4 - 1) * 40"),
    ({"partition": {"name": "similarity", "clients": 3, "similarity": 0.5, "outsiders": 3}}, "partition",
        "outsiders: 3 of 3 clients: at least one is none"),
    ({"partition": {"name": "group_skew", "clients": 3, "groups": 4, "p": 0.5}}, "partition",
        "groups: 4 groups of 10 classes and 3 clients: at least one each"),
    ({"partition": {"name": "classes_per_client", "clients": 4, "classes": 11}}, "partition", "classes: 11 of 10 clas"),
    ({"partition": {"name": "label_table", "clients": 4, "classes": 11}}, "partition", "classes: 11 of 10 classes"),
    ({"data": {"name": "mnist"}, "partition": {"name": "by_writer"}}, "partition", "by_writer: mnist does not record"),
    ({"monitor": {"name": "pgd", "eps": 0.1, "step": 2, "steps": 1}}, "monitor",
        "eps and step are fractions of the pixel range: 8/255, not 8"),
    ({"monitor": {"name": "autoattack", "eps": 8}}, "monitor", "eps is a fraction of the pixel range: 8/255, not 8"),
    ({"data": {"name": "celeba"}, "monitor": {"name": "autoattack", "eps": 0.1}}, "monitor",
        "AutoAttack's targeted losses need at least 4 classes, celeba has 2"),
    *[
        case
        for name in ("vit", "tnt", "t2t", "whole_vit")
        for case in [
            ({"model": {"name": name, "patch": 3}}, "model", "patch: patches of 3x3 do not tile images of 8x8"),
            ({"model": {"name": name, "patch": 4, "dim": 50}}, "model", "dim: 50 is not a multiple of its "),
        ]
    ],
    ({"model": {**EDGE, "stem": 7, "patch": 4}, "size": 24, "algorithm": {"name": "fedvkd"}}, "model",
        "patch: patches of 4x4 do not tile images of 6x6"),
    ({"model": {**EDGE, "heads": 5}, "algorithm": {"name": "fedvkd"}}, "model", "dim: 12 is not a multiple of its 5"),
    ({"model": EDGE}, "model", "fedavg needs a model without an edge (whole_vit?), not edge_vit"),
    *[
        ({"model": {"name": name}}, "model", "fedavg needs a model without an edge (whole_resnet?), not")
        for name in ("edge_resnet", "edge_resnet8")
    ],
    *[
        ({"algorithm": {"name": name}}, "algorithm",
            f"{name} trains a model of an edge and a server (edge_vit, ...), not small_cnn")
        for name in ("fedgkt", "fedvkd")
    ],
    ({"algorithm": {"name": "fedvkd"}, "model": {"name": "edge_resnet8"}}, "algorithm",
        "fedvkd needs a server with a distillation head: edge_vit"),
    ({"algorithm": {"name": "fedaux"}, "availability": {"drop": 0.1}}, "algorithm",
        "availability: fedaux needs the scores of all clients at its start"),
    ({"algorithm": {"name": "fedaux"}}, "algorithm", "auxiliary: fedaux needs unlabelled images: name a data set"),
    ({"algorithm": {**FEDAVG, "name": "fednova", "local": {**FEDAVG["local"], "proximal": {"name": "norm_per_tensor",
        "mu": 0.1}}}}, "algorithm", "('squared'), not norm_"),
    ({"partition": {"name": "iid", "clients": 1}, "algorithm": {"name": "centralized", "rounds": 2, "local": {**LOCAL,
        "proximal": {"name": "squared", "mu": 0.1}}, "moments": "released"}}, "algorithm",
        "local: proximal: no weights are broadcast"),
    ({"algorithm": {"name": "local_only", "rounds": 2, "local": {**LOCAL, "proximal": {"name": "squared", "mu": 0.1}}}},
        "algorithm", "local: proximal: no weights are broadcast"),
    ({"monitor": {"name": "exact_linear", "eps": 0.1}, "model": "mlp"}, "monitor", "exact_linear needs a network"),
    ({"algorithm": {"name": "centralized"}}, "algorithm", "centralized needs 'partition: {name: iid, clients: 1}'"),
    ({"algorithm": {**FEDAVG, "name": "fedavg_validated", "validators": 4}}, "algorithm",
        "validators: 4 of 4 clients leave none to train"),
    ({"algorithm": watched(name="matching")}, "algorithm", "window of 11 x 11"),
    ({"algorithm": {**watched(name="matching"), "rounds": 1000, "target_clients": 2}}, "algorithm",
        "1000 rounds of 2 target clients need 2000 images, there are "),
    ({"diagnostic": {"name": "leakage"}}, "diagnostic", "window of 11 x 11, images are 8 x"),
    ({"model": VIT, "diagnostic": {"name": "svcca", "n": 24, "blocks": "1"}}, "diagnostic",
        "n: 24 images are too few for a model of width 12"),
    ({"model": VIT, "diagnostic": {"name": "svcca", "blocks": "1,3"}}, "diagnostic",
        "blocks: no block 3: the model has 2"),
    ({"model": VIT, "diagnostic": {"name": "svcca", "blocks": "1", "pairs": "0-4"}}, "diagnostic",
        "pairs: client 4 of 4 (counted from 0)"),
    *[
        ({"model": EDGE, "algorithm": {"name": name, "rounds": 1, "server": SERVER,
            "local": {**LOCAL, "proximal": {"name": "squared", "mu": 0.1}}}}, "algorithm",
            "local: proximal: no edge receives broadcast weights")
        for name in ("fedgkt", "fedvkd")
    ],
    *[
        ({"algorithm": {"name": name, "standard": "standard", "adversarial": 5, "rounds": 1, "local": LOCAL,
            "aggregator": "samples"}}, "algorithm", "adversarial: 5 of 4 clients")
        for name in ("fedavg_mixed", "fedrbn")
    ],
    ({"algorithm": {"name": "fedrbn", "standard": "standard", "adversarial": 1, "rounds": 1, "local": LOCAL,
        "aggregator": "samples"}}, "algorithm", "fedrbn needs a network with `norm: dual`"),
    ({"algorithm": {"name": "fedavg", "rounds": 1, "aggregator": "samples", "local": {**LOCAL, "objective": {
        "name": "mixfat", "mix": "sum", "ratio": 0.2, "attack": {"name": "fgsm", "eps": 0.1}}}}},
     "algorithm: local: objective", "ratio: 'mix: sum' has no ratio"),
    ({"model": "mlp", "algorithm": {"name": "fedbn", "rounds": 1, "local": LOCAL, "aggregator": "samples"}},
     "algorithm", "fedbn needs a network with batch normalisation, and mlp has no part 'batch normalisation'"),
    *[
        ({"model": {**VIT, **model} if "head" in model else model, "algorithm": algorithm}, "algorithm", reason)
        for model in ("small_cnn", {"name": "whole_edge"}, {"head": "cls_vis"})
        for algorithm, reason in [
            ({"name": "fedsgd", "rounds": 1, "batch": 1, "lr": 0.1, "objective": "standard", "defence": "none"},
                "fedsgd: clients upload gradients only, but this model has batch normalisation"),
            ({**watched(name="matching"), "local": SGD}, "mode is eval: set mode: train"),
        ]
    ],
    *[
        ({"diagnostic": {"name": "membership", "calibration": 100, "outsiders": 100, **settings}, "test": 150},
            "diagnostic", reason)
        for settings, reason in (
            ({"calibration": 98}, "calibration: 0.01 false positives need 99 images"),
            ({"of": "global"}, "others compares uploads"),
            ({}, "calibration and outsiders: 200 of 150"),
        )
    ],
    ({"diagnostic": {"name": "exposure", "attackers": "component"}}, "diagnostic", "fedavg sends no features"),
    ({"diagnostic": {"name": "exposure", "inversion": "matching", "candidates": 2000}, "test": 100}, "diagnostic",
        "training and test images"),
    *[
        ({"model": EDGE, "malicious": {"clients": 1, "attack": "feature_flip"},
          "algorithm": {"name": name, "rounds": 1, "server": SERVER, "local": LOCAL, "features": "recompute"}},
         "algorithm", "features: recompute cannot hold poisoned rows")
        for name in ("fedgkt", "fedvkd")
    ],
    (seen(VIT, name="april_opt") | {"algorithm": {**watched(name="april_opt"), "mode": "train"}},
        "algorithm: inversion", "april_opt simulates eval mode"),
    *[
        ({"model": "small_cnn", "algorithm": {**watched(name=name, statistics=1), "mode": "train"}},
            "algorithm: inversion", "of the upload: set buffers: sent")
        for name in ("matching", "simulated")
    ],
    *[(seen({"name": "small_cnn"}, name=name), "algorithm: inversion", f"{name} {NEEDS}") for name in READERS],
    *[
        (seen(**inversion), "algorithm: inversion", f"{inversion['name']}: {FEW}")
        for inversion in [
            {"name": "patch_ls"}, {"name": "patch_span"}, {"name": "masked", "latent": None}, {"name": "oracle"},
        ]
    ],
    *[
        (seen({**VIT, "dim": 64}, **inversion, latent=33), "algorithm: inversion",
            f"{inversion['name']}: latent: 33 is 1089 unknowns a channel, and the system has rank at most 1024")
        for inversion in [{"name": "patch_ls", "solver": "upsample"}, {"name": "masked"}, {"name": "oracle"}]
    ],
    *[
        ({"data": {"name": "plane"}, "model": {"name": name}}, "model", f"{name}: needs images of at least {n}x{n}")
        for name, n in [
            ("nin", 4), ("small_cnn", 8), ("resnet18", 8), ("efficientnet_lite0", 8), ("leaf_cnn", 2),
            ("mcmahan_cnn", 4),
        ]
    ],
    *[
        ({"monitor": {"name": name, "kind": "contrast", "severity": 6}}, "monitor", "severity: expected 1 to 5, got 6")
        for name in ("corruption", "cifar10_c")
    ],
    ({"monitor": {"name": "cifar10_c", "kind": "fog"}}, "monitor", "cifar10_c holds the test images of cifar10"),
    ({"diagnostic": {"name": "backdoor", "target": 10}}, "diagnostic", "target: class 10 of 10 classes"),
    ({"diagnostic": {"name": "backdoor", "target": 0, "size": 8}}, "diagnostic", "size: a square of 8 pixels on"),
    ({"diagnostic": {"name": "boundaries"}}, "diagnostic",
        "boundaries: 10 classes of 1 x 8 x 8 images, not 2 classes of points"),
    ({"data": {"name": "plane"}, "model": {"name": "mlp"}, "diagnostic": {"name": "boundaries", "points": 1}},
        "diagnostic", "points: a grid of 1 x 1"),
    *[
        ({"algorithm": {**watched(name="matching"), **settings}}, "algorithm", reason)
        for settings, reason in [
            ({"weights": "moving", "local": SGD}, "weights: moving needs gradients at the honest weights"),
            ({"rounding": True, "local": SGD}, "rounding applies to gradients"),
            ({"batch": 2, "local": {**SGD, "batch": 4}}, "local: batch 4 is more than the 2 images of a client"),
            ({"aggregate": 2, "observed_rounds": 2}, "aggregate: needs observed_rounds: 1"),
        ]
    ],
    ({"algorithm": watched(name="imprint")}, "algorithm: inversion", "imprint needs the block of a malicious server"),
    ({"algorithm": {**watched(name="matching"), "defence": "fixed_position"}, "model": {"name": "small_cnn"}},
        "algorithm: defence", "fixed_position withholds learned positions, which this model lacks"),
    *[
        ({"algorithm": {**watched(name="matching"), "local": SGD, "defence": defence}}, "algorithm: defence",
            f"{defence['name']} {why}")
        for defence, why in [
            ({"name": "dpsgd", "noise": 1}, "clips the gradient of each example"),
            ({"name": "soteria", "fraction": 0.1}, "ranks the features of one gradient"),
        ]
    ],
    ({"algorithm": {**watched(name="imprint"), "manipulation": {"name": "imprint", "bins": 1}}},
        "algorithm: manipulation", "bins: an imprint block needs two bins or more"),
    ({"algorithm": {**watched(name="matching"), "manipulation": "dead_heads"}},
        "algorithm: manipulation", "dead_heads silences the other clients of a sum"),
    ({"algorithm": {**watched(name="simulated"), "local": {**SGD, "optimizer": "adam"}}},
        "algorithm: inversion", "simulated needs a client that trains by SGD"),
    ({"algorithm": {**watched(name="simulated"), "batch": 20, "local": {**SGD, "epochs": 3}}},
        "algorithm: inversion", "simulated: 60 local steps"),
    (seen({**VIT, "dim": 64}, name="patch_span", latent=33), "algorithm: inversion",
        "patch_span: a prior of 33 pixels a side is larger than the images of 32: latent is at most 32"),
]  # fmt: skip


def canonical(changes: dict) -> dict:
    """A cell with every setting, not yet refused."""
    spec = {**BASE, **changes}
    algorithm = dict(spec["algorithm"])
    if list(algorithm) == ["name"]:  # the rest of it does not matter
        known = {"rounds": 1, "local": LOCAL, "server": SERVER, "aggregator": "samples"}
        wanted = {setting.name for setting in signatures.describe("Algorithm", algorithm["name"]).settings}
        algorithm |= {key: value for key, value in known.items() if key in wanted}
    return calls.check("Experiment", {**spec, "algorithm": algorithm})


@pytest.fixture
def plugin(tmp_path, own_plugins):
    """Writes a plug-in and adds it, for one test."""

    def add(text: str):
        (tmp_path / "mine.py").write_text(text)
        signatures.add_plugin(tmp_path / "mine.py")
        return tmp_path / "mine.py"

    return add


def found(spec: dict) -> list[facts.Refusal]:
    cell = calls.call("Experiment", spec)
    return list(facts.refusals(cell, Facts(cell), ""))


def known(spec: dict) -> dict[str, int | None]:
    """The facts of a cell; None: only the files know."""
    names = ("malicious", "clients", "cohort", "images", "last_batch", "classes", "side", "channels")
    cell, values = Facts(spec), {}
    for name in names:
        try:
            values[name] = getattr(cell, name)
        except Unknown:
            values[name] = None
    return values


def all_refusals() -> set[tuple[str, str, str]]:
    """(kind, name, function) of whatever may refuse a cell."""
    return {
        (kind, name, function.__name__)
        for kind in signatures.TABLES
        for name in signatures.names(kind)
        for function in calls.entry(signatures.describe(kind, name)).refuse
    }


def test_the_cell_that_the_cases_change_is_not_refused():
    assert found(canonical({})) == []
    vit = {"model": VIT, "size": 16, "diagnostic": {"name": "svcca", "n": 25, "blocks": "1,2", "pairs": "0-3,1-server"}}
    assert found(canonical(vit)) == []
    assert found(canonical(seen({**VIT, "dim": 64}, name="masked", latent=32))) == []
    assert found(canonical({"model": EDGE, "algorithm": {"name": "fedvkd"}})) == []


CHANGED = pytest.mark.parametrize(
    ("changes", "place", "reason"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)


@CHANGED
def test_refused(changes, place, reason):
    cell = canonical(changes)
    assert [r for r in found(cell) if r.place == place and reason in r.reason]
    with pytest.raises(SpecError, match=r"^here: "):
        facts.refuse(calls.call("Experiment", cell), cell, "here")


@pytest.mark.parametrize("name", sorted(MODELS))
def test_an_entry_says_whether_its_network_has_batch_normalisation(name):
    settings = inspect.signature(MODELS[name]).parameters
    for head in ("cls", "cls_vis") if "head" in settings else (None,):
        chosen = {} if head is None else {"head": head}
        with torch.device("meta"):
            network = MODELS[name]((3, 32, 32), 10, **chosen)
        built = any(isinstance(module, _BatchNorm) for module in network.modules())
        assert Facts({"model": {"name": name, **chosen}}).batch_norm == built


def test_every_refusal_is_seen():
    seen_to = {(r.kind, r.name, r.condition) for changes, _, _ in CASES for r in found(canonical(changes))}
    assert all_refusals() == {r for r in seen_to if r[2] not in ("tolerates_byzantine", "tolerates_any_minority")}


@CHANGED
def test_the_same_function_under_another_name_in_a_plugin_refuses_the_same(changes, place, reason, plugin):
    cell = canonical(changes)
    call = cell
    for key in place.split(": "):
        call = call[key]
    module, table = signatures.TABLES[call.kind]
    if call.kind == "Algorithm":  # whose module has the name of the function
        module, entry = f"{module}.{call['name']}", call["name"].upper()
    else:
        entry = call["name"]
    plugin(f"from {module} import {entry}\n\n{table} = {{'mine': {entry}}}\n")
    ours = [r.reason for r in found(cell) if r.place == place]
    named, renamed = call["name"], copy.deepcopy(cell)
    call = renamed
    for key in place.split(": "):
        call = call[key]
    call["name"] = "mine"
    assert [r.reason.replace("mine", named) for r in found(renamed) if r.place == place] == ours


def test_what_is_not_known_refuses_nothing(plugin):
    """A data set of a plug-in without lines: neither its classes nor its side are known."""
    plugin('def mine(root):\n    """Mine."""\n\n\nDATASETS = {"mine": mine}\n')
    assert facts.of_data({"name": "mine"}) == Images(None, None, None, None, None)
    for changes in (
        {"partition": {"name": "classes_per_client", "clients": 4, "classes": 11}},
        {"model": {"name": "vit", "patch": 3, "dim": 12, "heads": 2}},
        {"monitor": {"name": "autoattack", "eps": 0.1}, "data": {"name": "celeba"}},
    ):
        assert found(canonical(changes))
        assert found(canonical({**changes, "data": {"name": "mine"}})) == []


def test_a_data_set_of_a_plugin_is_checked_as_ours_are(plugin):
    plugin(
        "from fatbench.suite.entry import DataEntry, Images\n\n\n"
        'def mine(root, *, twice: bool = False):\n    """Mine."""\n\n\n'
        "def counted(*, twice):\n    return Images(20 if twice else 10, 5, 3, 8, 1)\n\n\n"
        'DATASETS = {"mine": DataEntry(mine, images=counted)}\n'
    )
    assert facts.of_data({"name": "mine", "twice": True}) == Images(20, 5, 3, 8, 1)
    with pytest.raises(SpecError, match="train: 11 images wanted, mine has 10"):
        cells.canonical({**BASE, "data": {"name": "mine"}, "train": 11})
    with pytest.raises(SpecError, match="monitor: AutoAttack's targeted losses need at least 4 classes, mine has 3"):
        cells.canonical({**BASE, "data": {"name": "mine"}, "monitor": {"name": "autoattack", "eps": 0.1}})


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"train": 4 * 65}, 1),
        ({"train": 4 * 64}, 32),
        ({"train": 4 * 65 + 3}, 1),  # three images are nobody's
        ({"train": 4 * 66, "validation": 4}, 1),
        ({"train": 4}, 1),
        ({}, (1442 // 4 - 1) % 32 + 1),
        ({"partition": {"name": "dirichlet", "clients": 4, "alpha": 1}, "train": 4 * 65}, None),
        ({"data": {"name": "celeba"}}, None),  # about 8,802 images
        ({"algorithm": {"name": "fedsgd", "rounds": 1, "batch": 8, "lr": 0.1, "objective": "standard",
                        "defence": "none"}}, None),
    ],
)  # fmt: skip
def test_how_many_examples_the_last_batch_has(changes, expected):
    assert known(canonical(changes))["last_batch"] == expected


@pytest.mark.parametrize(("setting", "most"), [({"lr": 1e308}, 1_000_000), ({"epochs": 10**13}, 999_999_999)])
def test_what_nobody_can_run_is_refused(setting, most):
    with pytest.raises(SpecError, match=f"should be less than or equal to {most}, got 1"):
        canonical({"algorithm": {**FEDAVG, "local": {**LOCAL, **setting}}})


# --- facts --------------------------------------------------------------------------------------------------------


def test_facts_of_data_sets_follow_their_settings(tmp_path):
    """CelebA, 5 %: 10,014 images, 0.1 of them and 0.45 for each of 467.15 celebrities are test images."""
    assert facts.of_data({"name": "cifar10"}) == Images(50_000, 10_000, 10, 32, 3)
    assert facts.of_data(calls.check("Data", {"name": "cinic10", "enlarge": True})).train == 180_000
    celeba = facts.of_data(calls.check("Data", "celeba"))
    assert celeba == Images(8_802, 1_212, 2, 84, 3, about=True)
    assert facts.of_data(calls.check("Data", {"name": "celeba", "split": "json"})).train is None
    folder = calls.check("Data", {"name": "image_folder", "path": str(tmp_path), "size": 16})
    assert facts.of_data(folder) == Images(None, None, None, 16, 3, about=True)
    for part, images in (("train/cat", 3), ("train/dog", 2), ("test/cat", 1)):
        (tmp_path / part).mkdir(parents=True)
        for i in range(images):
            (tmp_path / part / f"{i}.png").touch()
    (tmp_path / "train" / "cat" / ".hidden").touch()
    assert facts.of_data(folder) == Images(5, 1, 2, 16, 3, about=True)


@pytest.mark.parametrize("name", signatures.names("Data"))
def test_facts_of_a_data_set_are_those_of_the_catalogue(name):
    from fatbench.data import catalogue

    settings = {"path": "nowhere", "size": 8} if name == "image_folder" else {}
    settings = {"dataset": "mine", "size": 8} if name in ("torchvision", "huggingface") else settings
    data = facts.of_data(calls.check("Data", {"name": name, **settings}))
    known = catalogue.dataset_facts(name)
    assert (data.train, data.test, data.classes) == (known.train, known.test, known.classes)
    assert (data.channels, data.side, data.side) == (known.shape or (3, 8, 8))


def test_the_role_of_an_attack(plugin):
    """What its entry says; a wrapper has that of what it wraps; a word that is none is refused."""
    plugin(
        "from fatbench.suite.entry import AttackEntry\n"
        'def noise(model, x, y, generator, index):\n    """Noise."""\n'
        'def around(model, x, y, generator, *, attack: Attack):\n    """Around."""\n'
        'def odd(model, x, y, generator):\n    """Odd."""\n'
        "ATTACKS = {'noise': AttackEntry(noise, role='corruption'), 'around': around,\n"
        "           'odd': AttackEntry(odd, role='corruptions')}\n"
    )
    roles = ("natural", {"name": "fgsm", "eps": 0.1}, "noise", {"name": "around", "attack": "noise"})
    expected = ["natural", "attack", "corruption", "corruption"]
    assert [facts.role(calls.check("Attack", one)) for one in roles] == expected
    with pytest.raises(SpecError, match=r"mine.py:\d+: role 'corruptions': expected natural, corruption, attack \(did"):
        facts.role({"name": "odd"})
    for monitor in ("noise", {"name": "around", "attack": "noise"}):
        with pytest.raises(SpecError, match="'noise' asks for 'index'"):
            cells.canonical({**BASE, "monitor": monitor})


def test_facts_of_a_cell():
    """Of 1,442 images 42 are held out; half of 5 clients is 2."""
    cell = canonical({"validation": 42, "partition": {"name": "iid", "clients": 5}, "size": 16,
                      "algorithm": {**FEDAVG, "participation": 0.5}})  # fmt: skip
    assert known(cell) == {
        "malicious": 0, "clients": 5, "cohort": 2, "images": 1400, "classes": 10, "side": 16, "channels": 1,
        "last_batch": 24,
    }  # fmt: skip
    assert known(canonical({"partition": {"name": "by_writer"}}))["cohort"] is None
    liars = {"malicious": {"clients": "0,2,4", "attack": "sign_flip"}}
    assert known({**cell, **liars})["malicious"] == 1  # 6 / 5 of an average round


@pytest.mark.parametrize("name", sorted(MODELS.keys() - {"edge_vit", "edge_resnet", "edge_resnet8"}))
def test_the_head_of_a_model_is_known_without_building_it(name: str) -> None:
    """The weights that emit logits, for plans of what crosses without them; `edge_*` have a second classifier."""
    model = {"name": name, **({"patch": 4} if name in ("tnt", "vit", "t2t") else {})}
    cell = Facts({"model": model, "data": {"name": "digits"}, "size": 32})
    with torch.device("meta"):
        network = calls.build("Model", calls.check("Model", model))((cell.channels, 32, 32), cell.classes)
    heads = {*logit_parameters(network)}
    assert cell.head == sum(value.numel() for key, value in network.named_parameters() if key in heads) > 0
