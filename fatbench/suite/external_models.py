"""External models as cells: a file of weights, its network, and the form of its images.

    spec = cell(Model("my.pt", sha256, "timm/resnet18", code=""), data={"name": "cifar10"})
    cells.identity(spec)           from the contents alone: the same weights under another file name are the same cell

Such a cell cannot be trained; its only round is the given model. The model is stored like that of any other cell, so
stages, reports and exchange treat it alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from fatbench.errors import SpecError, about
from fatbench.suite import calls, facts, signatures, standard_attacks
from fatbench.suite.cells import Evaluation

SUITE = "evaluate"  # the name of the suite of all such cells
ROUND = 1
SEED = 0  # of the attacks' random starts
Outputs = Literal["logits", "probabilities", "sigmoid"]
Channels = Literal["rgb", "bgr"]


@dataclass(frozen=True)
class Model:
    """An external model: its content, and the form of the images it takes.

    mean, std: one number per channel, in the network's order of channels; empty to leave images in [0, 1].
    """

    name: str  # of the file, for people; not part of the identity
    sha256: str  # of the file
    network: str  # "timm/NAME", "FILE.py:FUNCTION" or, of a module in memory, the name of its class
    code: str = ""  # SHA-256 of FILE.py; empty for timm, whose version is in the provenance
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    outputs: Outputs = "logits"
    channels: Channels = "rgb"
    named: bool = False  # True: a user gave the name, and all models of it form one row; not part of the identity

    def __post_init__(self) -> None:
        for option, value, choices in (("outputs", self.outputs, Outputs), ("channels", self.channels, Channels)):
            if value not in get_args(choices):
                *others, last = get_args(choices)
                raise SpecError(f"expected {', '.join(others)} or {last}, got '{value}'", option=option)
        if bool(self.mean) != bool(self.std):
            raise SpecError(" and std go together", option="mean")
        if self.mean and len(self.mean) != len(self.std):
            raise SpecError(f" has {len(self.mean)} numbers, std {len(self.std)}: give one per channel", option="mean")
        if any(not value > 0 for value in self.std):
            raise SpecError(f"expected numbers above 0, got {', '.join(map(str, self.std))}", option="std")


def cell(model: Model, data: Any, test: int | None = None, size: int | None = None, seed: int = SEED) -> dict[str, Any]:
    """The spec of a model evaluated on the first `test` test images of a data set, resized to `size` pixels a side.

    data: a name or a mapping, as in a suite. SpecError for an unknown data set or setting, or too many images.
    """
    with about("dataset"):
        checked = calls.check_keys("Data", data)
    data_facts = facts.of_data(checked)
    if test and data_facts.test and test > data_facts.test and not data_facts.about:
        raise SpecError(f"{test} test images wanted, {checked['name']} has {data_facts.test}")
    channels = data_facts.channels
    if model.mean and channels and len(model.mean) not in (1, channels):
        raise SpecError(f"{len(model.mean)} numbers for images of {channels} channels", option="mean")
    if model.channels == "bgr" and channels not in (None, 3):
        raise SpecError(f"channels bgr: images of {checked['name']} have {channels} channel")
    evaluated = {**asdict(model), "mean": list(model.mean), "std": list(model.std)}
    if not model.named:
        del evaluated["named"]
    return {
        "evaluated": evaluated, "data": checked, "test": test, "size": size, "seed": seed,
        "algorithm": {"name": "none", "rounds": ROUND}, "partition": {"name": "none"}, "model": {"name": model.network},
    }  # fmt: skip


def label(spec: Mapping[str, Any]) -> str:
    """The model's name in reports: "my.pt [3f2a9c01]", file and start of the digest, or a name that the user gave."""
    if spec["evaluated"].get("named"):
        return str(spec["evaluated"]["name"])
    return f"{spec['evaluated']['name']} [{spec['evaluated']['sha256'][:8]}]"


def describe_model(spec: Mapping[str, Any]) -> str:
    """A full description of a model in one line."""
    evaluated = spec["evaluated"]
    phrases = [f"{evaluated['name']} (SHA-256 {evaluated['sha256']})", evaluated["network"]]
    if evaluated["mean"]:
        phrases.append(f"mean {_numbers(evaluated['mean'])}, std {_numbers(evaluated['std'])}")
    else:
        phrases.append("images in [0, 1]")
    phrases += [] if evaluated["channels"] == "rgb" else [f"channels {evaluated['channels']}"]
    phrases += [f"resized to {spec['size']} pixels"] if spec["size"] else []
    return ", ".join([*phrases, evaluated["outputs"]])


def _numbers(values: list[float]) -> str:
    return "/".join(f"{value:g}" for value in values)


# --- attacks ------------------------------------------------------------------------------------------------------


def evaluations(
    texts: Sequence[str | tuple[str, Any]], eps: str | float, n: int | None, batch: int
) -> tuple[Evaluation, ...]:
    """The evaluations behind texts such as "pgd20", "{name: pgd, ...}" or "LABEL={name: pgd, ...}".

    A name of standard_attacks.DEFAULT has the field's settings at radius `eps`; pgd20 and cw take steps of eps / 4. Any
    other name gets the eps, step and steps that it needs from pgd20; a mapping gets only the radius. `natural` always
    comes first, because accuracy without attack shows whether the preprocessing is right. SpecError for bad texts.
    """
    evaluation_by_name: dict[str, Evaluation] = {}
    for text in ["natural", *texts]:
        label, spec = read_attack(text, eps) if isinstance(text, str) else text
        if isinstance(spec, str) and not isinstance(text, str):  # a pair of a label and a name
            spec = read_attack(spec, eps)[1]
        spec = with_radius(spec, eps, is_bare=isinstance(text, str) and not text.rstrip().endswith("}"))
        with about(f"attack {text if isinstance(text, str) else spec['name']}"):
            attack = calls.check_keys("Attack", spec)
        name = label or _label(attack)
        if not re.fullmatch(r"[a-z_][a-z0-9_]*", name):
            raise SpecError(f"'{name}' is no name of a metric: expected letters a to z, digits and _", option="attack")
        if name in evaluation_by_name and evaluation_by_name[name].attack != attack:
            how = f"write {name}_2={text}" if isinstance(text, str) else f"name them, {{'{name}_2': ...}}"
            raise SpecError(f"two attacks are called '{name}': {how}", option="attack")
        evaluation_by_name[name] = Evaluation(name, attack, n, batch)
    return tuple(evaluation_by_name.values())


def described(texts: Sequence[str]) -> dict[str, dict[str, Any] | None]:
    """Label -> settings of further attacks of a suite, written as mappings; None: the suite, or the field, has them."""
    attacks: dict[str, dict[str, Any] | None] = {}
    for text in texts:
        label, spec = read_attack(text, standard_attacks.DEFAULT_RADIUS) if "{" in text else (text, None)
        if spec is not None and not label:
            with about(f"attack {text}"):
                checked = calls.check_keys("Attack", with_radius(spec, standard_attacks.DEFAULT_RADIUS, False))
            label = _label(checked)
        attacks[label] = spec
    return attacks


def with_radius(spec: Any, eps: str | float, is_bare: bool) -> Any:
    """An attack with the radius that it needs and does not state; a bare name also gets step and steps."""
    name = spec.get("name") if isinstance(spec, Mapping) else None
    if name not in signatures.names("Attack"):
        return spec  # `calls.check` reports the unknown name
    usual = {key: value for key, value in standard_attacks.settings(eps)["pgd20"].items() if key != "name"}
    required = {one.name for one in signatures.describe("Attack", name).settings if one.default is signatures.REQUIRED}
    missing = required & ({*usual} if is_bare else {"eps"}) - {*spec}
    return {**spec, **{key: usual[key] for key in usual if key in missing}}


def _label(attack: Mapping[str, Any]) -> str:
    """The label of an attack without one: "pgd7", "cw", or the name inside another package."""
    if attack["name"] == "pgd":
        return f"pgd{attack['steps']}"
    return str(attack["attack"]).lower() if "attack" in attack else str(attack["name"])


def read_attack(text: str, eps: str | float) -> tuple[str, Any]:
    """(label or "", name or mapping) of an attack as a user writes it; SpecError if it cannot be read."""
    settings = standard_attacks.settings(eps)
    if text in settings:
        return text, settings[text]
    label, equals, attack_text = text.partition("=")
    if not (equals and label.strip().isidentifier()):
        label, attack_text = "", text
    if not attack_text.lstrip().startswith("{"):
        name, attack_names = attack_text.strip(), [*settings, *signatures.names("Attack")]
        if name not in attack_names:
            hint = standard_attacks.did_you_mean_metric(name, attack_names)
            raise SpecError(f"no attack is named '{name}'{hint}", option="attack")
        return label.strip(), settings.get(name, {"name": name})
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        mapping = YAML(typ="safe", pure=True).load(attack_text)
    except YAMLError:
        raise SpecError(
            f"cannot read '{attack_text}' as a mapping such as {{name: fgsm, eps: 8/255}}", option="attack"
        ) from None
    if any(":" in str(key) for key in mapping):
        raise SpecError(
            f"'{attack_text}' needs a space after each colon, as in {{name: fgsm, eps: 8/255}}", option="attack"
        )
    return label.strip(), mapping
