"""What a type cannot say: rules between settings of one cell, checked before anything is imported or run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fatbench.errors import SpecError
from fatbench.suite.types import number

if TYPE_CHECKING:
    from fatbench.data.catalogue import Facts


def cohort(spec: Mapping[str, Any]) -> int:
    """m = max(1, int(C * K)): clients that take part in a round, of those that train (methods: Conventions)."""
    clients = int(spec["partition"].get("clients") or 1) - spec["protocol"].get("validators", 0)
    return max(1, int(float(number(spec["protocol"].get("participation", 1.0))) * clients + 1e-9))


def known(data: Mapping[str, Any]) -> Facts | None:
    """What the catalogue knows of a data set; None of one that a plugin brings."""
    from fatbench.data.catalogue import CATALOGUE, facts

    return facts(data) if data["name"] in CATALOGUE else None


def check(spec: Mapping[str, Any], place: str) -> None:
    """Refuse a cell whose settings contradict each other or its data set. SpecError says which and why."""
    facts = known(spec["data"])
    partition, protocol = spec["partition"], spec["protocol"]
    clients = partition.get("clients")

    n_train = spec["train"] or (facts.train if facts else None)
    if facts and facts.exact:
        for key, have in (("train", facts.train), ("test", facts.test)):
            if spec[key] and have and spec[key] > have:
                raise SpecError(f"{place}: {key}: {spec[key]} images asked for, {spec['data']['name']} has {have}")
    if n_train:
        if spec["validation"] >= n_train:
            raise SpecError(
                f"{place}: validation: {spec['validation']} held-out images of {n_train} leave none to train on"
            )
        if clients and clients > n_train - spec["validation"]:
            left = n_train - spec["validation"]
            raise SpecError(f"{place}: partition: {clients} clients, but only {left} training images")

    rule = protocol.get("rule")
    if rule and "top" in rule and clients:
        m = cohort(spec)
        if rule["top"] > m / 2:
            raise SpecError(f"{place}: rule: top: {rule['top']} is more than half of the {m} clients of a round")
    if partition["name"] == "shah" and clients and partition.get("own_share") is None:
        skew = float(number(partition["skew"]))
        if (clients - 1) * skew >= 100:
            raise SpecError(
                f"{place}: partition: skew: (clients - 1) * skew must be below 100, got ({clients} - 1) * {skew:g}"
            )
    validators = protocol.get("validators", 0)
    if clients and validators >= clients:
        raise SpecError(f"{place}: protocol: validators: {validators} of {clients} clients leave nobody to train")
    if partition["name"] == "group_skew" and facts and facts.classes:
        groups = partition["groups"]
        if groups > min(clients, facts.classes):
            what = f"{groups} groups of {facts.classes} classes and {clients} clients: at least one each"
            raise SpecError(f"{place}: partition: groups: {what}")
    per_client = partition["classes"] if partition["name"] in ("classes_per_client", "label_table") else 0
    if facts and facts.classes and per_client > facts.classes:
        raise SpecError(f"{place}: partition: classes: {per_client} of {facts.classes} classes")
    if partition["name"] == "by_writer" and facts and spec["data"]["name"] != "celeba":
        raise SpecError(f"{place}: partition: by_writer: {spec['data']['name']} does not say who wrote which example")
    model, distils = spec["model"]["name"], protocol["name"] in ("fedgkt", "fedvkd")
    if model.startswith("edge_") != distils:
        whole = f"a model that is trained whole ({model.replace('edge_', 'whole_')}?)"
        wants = "a model of an edge and a server (edge_vit, ...)" if distils else whole
        raise SpecError(f"{place}: model: {protocol['name']} trains {wants}, not {model}")
    if protocol["name"] == "fedvkd" and model != "edge_vit":
        raise SpecError(f"{place}: model: fedvkd needs a server with a distillation head: edge_vit")
    if protocol["name"] == "fedaux" and spec["auxiliary"] is None:
        raise SpecError(f"{place}: auxiliary: fedaux needs unlabelled images: name a data set")
    if protocol["name"] == "centralized" and clients != 1:
        raise SpecError(f"{place}: protocol: centralized needs 'partition: {{name: iid, clients: 1}}'")
    if spec["monitor"] is not None:
        check_attack(spec["monitor"], spec, f"{place}: monitor")
    size = spec["size"] or (facts.shape[1] if facts and facts.shape else None)
    _check_model(spec["model"], size, place)
    compares = protocol["name"] == "eavesdrop" or (spec["probe"] or {}).get("name") == "leakage"
    if compares and size and size < 11:
        raise SpecError(
            f"{place}: size: pictures are compared by SSIM, whose window is 11 x 11; images are {size} x {size}"
        )
    if protocol["name"] == "eavesdrop":
        _check_inversion(protocol["inversion"], spec["model"], size, place)
    if spec["probe"] is not None:
        _check_probe(spec, clients, place)


def _check_model(model: Mapping[str, Any], size: int | None, place: str) -> None:
    """Refuse a vision transformer whose images or widths do not come out even."""
    patch, dim, heads = (model.get(key) for key in ("patch", "dim", "heads"))
    if size and "stem" in model:  # patches are cut from the edge's feature map, a quarter of the image behind stem 7
        size = size * 4 // (3 * model["stem"] - 5)
    if patch and size and size % patch:
        raise SpecError(
            f"{place}: model: patch: patches of {patch}x{patch} do not tile images of {size}x{size} (see 'size')"
        )
    if dim and heads and dim % heads:
        raise SpecError(f"{place}: model: dim: {dim} is not a multiple of its {heads} attention heads")


def _check_inversion(inversion: Mapping[str, Any], model: Mapping[str, Any], size: int | None, place: str) -> None:
    """Refuse a network without patches and learned positions, and more unknowns than the gradient has equations."""
    name, place = inversion["name"], f"{place}: inversion"
    if name not in ("april", "april_opt", "patch_ls", "patch_span", "masked", "oracle"):
        return
    if "patch" not in model:
        raise SpecError(
            f"{place}: {name} needs a transformer with a patch embedding and learned positions: {{name: vit}}"
        )
    width = model.get("dim")
    if not (size and width) or name in ("april", "april_opt") or inversion.get("of") == "april":
        return
    patches, latent = (size // model["patch"]) ** 2, inversion.get("latent")
    if inversion.get("solver", "upsample") != "upsample":
        latent = None
    rank = min(patches, width)
    if width < patches and (latent is None or name in ("patch_span", "oracle")):
        raise SpecError(
            f"{place}: {name}: images of {size} pixels are {patches} unknown patches, and a model of width {width} "
            f"gives a system of rank {rank}; take a wider model, larger patches, or an upsampling prior"
        )
    if latent is not None and name != "patch_span" and latent**2 > rank * model["patch"] ** 2:
        raise SpecError(
            f"{place}: {name}: latent: {latent} is {latent**2} unknowns a channel, and the system has rank at most "
            f"{rank * model['patch'] ** 2}"
        )


def _check_probe(spec: Mapping[str, Any], clients: int | None, place: str) -> None:
    """Refuse blocks that the model has not, and clients that there are not."""
    if spec["monitor"] is None:
        raise SpecError(f"{place}: probe: needs 'monitor': it runs when the monitor does, on images that it attacks")
    probe, depth, width = spec["probe"], spec["model"].get("depth"), spec["model"].get("dim")
    if width and probe.get("n", math.inf) <= 2 * width:
        raise SpecError(f"{place}: probe: n: {probe['n']} images are too few for a model of width {width}")
    for key in ("blocks", "pairs"):
        for part in str(probe[key]).replace("-", ",").split(",") if key in probe else ():
            if part == "server" and key == "pairs":
                continue
            if not part.strip().isdecimal():
                raise SpecError(f"{place}: probe: {key}: expected {PROBE_SHAPES[key]}, got '{probe[key]}'")
            if key == "blocks" and depth and not 1 <= int(part) <= depth:
                raise SpecError(f"{place}: probe: blocks: block {int(part)} of a model with {depth} blocks")
            if key == "pairs" and clients and int(part) >= clients:
                raise SpecError(f"{place}: probe: pairs: client {int(part)} of {clients} (counted from 0)")


PROBE_SHAPES = {"blocks": "numbers such as 1,9", "pairs": "pairs such as 0-3,0-server"}


def check_attack(attack: Mapping[str, Any], spec: Mapping[str, Any], place: str) -> None:
    """Refuse an attack that the cell's data set has too few classes for."""
    facts = known(spec["data"])
    if attack["name"] == "autoattack" and facts and facts.classes and facts.classes < 4:
        raise SpecError(
            f"{place}: AutoAttack's targeted losses need at least 4 classes, {spec['data']['name']} has {facts.classes}"
        )
