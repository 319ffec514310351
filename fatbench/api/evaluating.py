"""Models that were trained anywhere, attacked: modules and files, on data sets and arrays, by names and functions."""

from __future__ import annotations

import html
import inspect
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas

from fatbench.api.asking import Plugins, Where, filter_text, plugged, suite_of
from fatbench.api.lines import Lines, in_notebook
from fatbench.api.shown_tables import Table
from fatbench.errors import Doubtful, FatbenchError, SpecError, shown, whole
from fatbench.methods.intervals import wilson
from fatbench.report import build_tables
from fatbench.report.numbers.doubts import MEASURED_WELL, in_words
from fatbench.report.numbers.statistics import bits_array
from fatbench.report.numbers.stored import accuracies
from fatbench.report.pairs import label, measured_numbers
from fatbench.report.tables import external_suite as reporting_evaluated
from fatbench.runner.run_options import RunOptions
from fatbench.store.opening import opened
from fatbench.store.stages import Store
from fatbench.suite import external_models, registered, standard_attacks
from fatbench.suite.files import Suite

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fatbench.runner.jobs import CellStatus, Event

Attack = str | Mapping[str, Any] | Callable[..., Any]
CHECK = "check mean, std, channels, size and the order of classes"


@dataclass(frozen=True, repr=False)
class Evaluation(Table):
    """Accuracies of a model under attacks, as fractions, with doubts, a table of one row and a sentence."""

    accuracy: dict[str, float] = field(default_factory=dict)  # metric -> accuracy
    doubts: list[str] = field(default_factory=list)  # in words
    bits: dict[str, tuple[int, int]] = field(default_factory=dict)  # metric -> outcomes
    cell: str = ""
    answer: str = ""  # "robust accuracy 60.0 % (50 to 69), Linf 8/255, AutoAttack, 100 images"

    def __repr__(self) -> str:
        return f"{self.answer}\n\n{self.markdown()}"

    def _repr_html_(self) -> str:
        return f"<p><strong>{html.escape(self.answer)}</strong></p>{self.html()}"

    @property
    def outcomes(self) -> pandas.DataFrame:
        """Whether each image is classified right: a row for each image, a column for each metric, bool."""
        return pandas.DataFrame({metric: bits_array(bits) for metric, bits in self.bits.items()})

    def interval(self, metric: str) -> tuple[float, float]:
        """95 % interval (Wilson) of an accuracy on other such images. SpecError: there is no such metric."""
        if metric not in self.bits:
            hint = standard_attacks.did_you_mean_metric(metric, self.bits)
            raise SpecError(f"metric: nothing is measured as '{metric}'{hint}")
        bits, n = self.bits[metric]
        return wilson(bits.bit_count(), n)


@registered.lending()
def evaluate(
    model: nn.Module | Callable[[Tensor], Tensor] | str | Path,
    dataset: Any = None,
    attacks: Attack | Sequence[Attack] | None = None,
    *,
    eps: float | str = "8/255",
    n: int | None = None,
    seed: int = 0,
    name: str | None = None,
    expect_natural: float | None = None,
    strict: bool = False,
    like: str | Path | Suite | None = None,
    preset: str = "paper",
    where: Where = None,
    network: str | None = None,
    entry: str | None = None,
    batch: int = 500,
    mean: float | Sequence[float] = (),
    std: float | Sequence[float] = (),
    outputs: external_models.Outputs = "logits",
    channels: external_models.Channels = "rgb",
    size: int | None = None,
    device: str | None = None,
    precision: str | None = None,
    plugins: Plugins = (),
    db: str | Path | None = None,
    data_folder: str | Path | None = None,
    quiet: bool | None = None,
) -> Evaluation:
    """Attack a model that was trained anywhere: a table of one row, with what is doubtful about it.

    model: a module, or anything that is called with images, which is left as it was: images (B, C, H, W) in [0, 1], in
    the type of its weights, to logits (B, classes). Or the file of a state dict, and then `network` names what it
    belongs to, "timm/NAME" or "FILE.py:FUNCTION", and entry which state of a file with several, "state_dict_ema".
    dataset: a name or a mapping as in a suite; arrays or tensors (x, y), x as `dataset` takes it: uint8, or floats in
    [0, 1], which are rounded to 1/255; what `dataset` returns; a torch Dataset or DataLoader, or a Hugging Face
    Dataset, of images and labels. The first n test images are attacked.
    attacks: names ("pgd20"), text "{name: pgd, eps: 8/255, ...}", mappings of that, functions (model, x, y) to images
    like x, or attacks of torchattacks; default: the field's five; [] none. eps: radius of those given by name alone.
    seed: of the random starts; of the training, where several networks of one `name` are evaluated: they are one row.
    expect_natural: the accuracy that your own program measured; Doubtful, and no attack, where it is another here.
    strict: Doubtful if a number cannot be right.
    like: a suite, whose images and attacks are taken (of `preset`, and of the cells in `where`), so that
    `table(..., with_evaluated=True)` has a row of it.
    batch: images at once. mean, std, outputs, channels, size: the preprocessing of the network, see docs/evaluate.md.
    db: where the numbers are stored; None: nowhere. data_folder: of the data sets. quiet: without progress; None: with
    it in a notebook only.
    SpecError: the network does not fit its file, or the images; MachineError: data missing, file unreadable.

    >>> import torch, fatbench
    >>> module = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> result = fatbench.evaluate(module, "digits", ["fgsm"], n=50)
    >>> list(result.accuracy), result.outcomes.shape
    (['natural', 'fgsm'], (50, 2))
    """
    from fatbench.runner import evaluate_external

    n, size = (None if value is None else whole(limit, value, 1) for limit, value in (("n", n), ("size", size)))
    batch, seed = whole("batch", batch, 1), whole("seed", seed)
    preprocessing: dict[str, Any] = {
        "mean": _numbers("mean", mean), "std": _numbers("std", std), "outputs": outputs, "channels": channels,
    }  # fmt: skip
    is_fraction = not isinstance(expect_natural, bool | str) and 0 <= (expect_natural or 0) <= 1
    if not is_fraction:
        raise SpecError(f"expect_natural: expected a fraction such as 0.95 (and not 95), got {expect_natural!r}")
    if not isinstance(model, str | Path):
        external = evaluate_external.from_module(model, name, **preprocessing)
    elif network is None:
        raise SpecError(f"{model}: name its network: network='timm/NAME' or 'FILE.py:FUNCTION'")
    else:
        external = evaluate_external.from_file(Path(model), network, name, entry, **preprocessing)
        if external.note:
            print(f"fatbench: {external.note}", file=sys.stderr)
    with plugged(plugins, db):
        like_plan = None if like is None else suite_of(like).plan(preset, None, filter_text(where))
        data = _dataset(dataset, model, n)
        texts = _attacks(attacks, model)
        task = evaluate_external.task(like_plan, data, texts, eps=_radius(eps), n=n, batch=batch, size=size)
    if db is not None:
        registered.stay()
    with tempfile.TemporaryDirectory() as nowhere:  # without db=, numbers pass through a database that is deleted
        url = str(db or Path(nowhere) / "evaluate.db")
        options = RunOptions(device=device, precision=precision, db=url, data=data_folder)
        lines = Lines("", quiet=not in_notebook() if quiet is None else quiet)
        lines.labels = {"": external.model.name}

        def notify(event: Event) -> None:
            if event.stage == "cell":  # how the network is called here, or how its state was made to fit
                print(f"fatbench: {event.message}", file=sys.stderr)
            else:
                lines.see(0, replace(event, cell="")) if event.kind != "done" else None

        try:
            cell, status = attack_and_store(external, replace(task, seed=seed), options, notify, expect_natural)
        finally:
            lines.close()
        with opened(url) as store:
            assert store is not None
            if status != "done":
                errors = [row.error.strip().splitlines()[-1] for row in store.stages([cell]).values() if row.error]
                raise FatbenchError(f"{external.model.name}: {status}: {'; '.join(errors)}")
            evaluation = _evaluation(cell, store, {planned.id: planned.attack for planned in task.evaluations})
    if strict and evaluation.doubts:
        raise Doubtful(f"strict: {external.model.name}: {'; '.join(evaluation.doubts)}")
    return evaluation


def attack_and_store(
    external: Any,
    task: Any,
    options: RunOptions,
    notify: Callable[[Event], None],
    expected_natural: float | None = None,
    in_percent: bool = False,
) -> tuple[str, CellStatus]:
    """Attack and store, see `evaluate_external.evaluate`. expected_natural: a fraction; in_percent: in a message.

    Doubtful: the natural accuracy here differs by more than so few images explain; no attack was run.
    """
    if expected_natural is not None:
        natural = tuple(evaluation for evaluation in task.evaluations if evaluation.label == "natural")
        if not natural:
            raise SpecError("there is no evaluation named 'natural'", option="expect-natural")
        # the natural images alone: a network with wrong preprocessing shows before hours of attacks
        cell, status = _attack_and_judge(external, replace(task, evaluations=natural), options, notify)
        if status == "done":
            with opened(options.db) as store:
                assert store is not None
                accuracy, n = accuracies([cell], store)[cell, natural[0].stage(external_models.ROUND)]
            low, high = wilson(round(accuracy * n), n)
            if not low <= expected_natural <= high:
                scale, unit, digits = (100, " %", 2) if in_percent else (1, "", 4)
                raise Doubtful(
                    f"natural accuracy is {scale * accuracy:.{digits}f}{unit} of {n} images (95 % interval"
                    f" {scale * low:.{digits}f} to {scale * high:.{digits}f}); {CHECK}. No attack was run",
                    option=f"expect-natural {scale * expected_natural:g}",
                )

    def notify_of_stages(event: Event) -> None:
        if expected_natural is None or event.stage != "cell":  # else it was said above
            notify(event)

    return _attack_and_judge(external, task, options, notify_of_stages)


def _attack_and_judge(
    external: Any, task: Any, options: RunOptions, notify: Callable[[Event], None]
) -> tuple[str, CellStatus]:
    from fatbench.report.numbers import sql_tables
    from fatbench.runner import evaluate_external

    cell, status = evaluate_external.evaluate(external, task, options, notify)
    with opened(options.db) as store:
        assert store is not None
        sql_tables.judge(store, [cell])  # SQL has its doubts, too, and `fatbench check` compares them
    return cell, status


def answer(results: Sequence[Mapping[str, Any]]) -> str:
    """The sentence "robust accuracy 60.0 % (50 to 69), Linf 0.1, AutoAttack, 100 images"; natural without an attack.

    results: one mapping for each evaluation: label, attack (its settings), accuracy and n.
    """
    if not results:
        return "nothing was measured"
    attacked = [row for row in results if row["label"] != "natural"]
    row = min(attacked or results, key=lambda result: result["accuracy"])
    low, high = wilson(round(row["accuracy"] * row["n"]), row["n"])
    attack = row["attack"] or {}
    radius = f", {attack.get('norm', 'Linf')} {attack['eps']}" if "eps" in attack else ""
    label = f", {standard_attacks.attack_name(row['label'])}" if attacked else ""
    lowest = f", the lowest of {len(attacked)}" if len(attacked) > 1 else ""
    kind = "robust" if attacked else "natural"
    return (
        f"{kind} accuracy {100 * row['accuracy']:.1f} % ({100 * low:.0f} to {100 * high:.0f}){radius}{label}{lowest},"
        f" {row['n']} images"
    )


def _evaluation(cell: str, store: Store, asked_ids: Mapping[str, Any]) -> Evaluation:
    """The stored numbers of a cell; asked_ids: id of an evaluation -> its attack."""
    grids = build_tables(*reporting_evaluated.suite_and_plan(store, f"id={cell}", {*asked_ids}), store)
    found = {id: number for id, number in measured_numbers(store, [cell], "last")[cell].items() if id in asked_ids}
    numbers = {label(id): number for id, number in found.items()}
    asked = [{"label": label(id), "attack": asked_ids[id], "accuracy": v.value, "n": v.n} for id, v in found.items()]
    doubts = dict.fromkeys(doubt for number in numbers.values() for doubt in number.doubts)
    order = sorted(numbers, key=standard_attacks.strength)
    return Evaluation(
        grids,
        accuracy={metric: numbers[metric].value for metric in order},
        doubts=in_words(doubt for doubt in doubts if doubt.code not in MEASURED_WELL),
        bits={metric: bits for metric in order if (bits := numbers[metric].outcomes) is not None},
        cell=cell,
        answer=answer(asked),
    )


# --- the arguments ------------------------------------------------------------------------------------------------


def _radius(eps: float | str) -> float | str:
    """A radius as suites write it: 8/255 as a number becomes "8/255", so that it is the same evaluation."""
    steps = 255 * eps if isinstance(eps, float) and math.isfinite(eps) else 0
    return f"{steps:.0f}/255" if round(steps) > 0 and abs(steps - round(steps)) < 1e-9 else eps


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    """One number, or one for each channel. SpecError: anything else, or a number that is not finite."""
    listed = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]
    for value in listed:
        if isinstance(value, bool | str) or not hasattr(value, "__float__") or not math.isfinite(value):
            raise SpecError(f"{name}: expected finite numbers, one or one per channel, got {shown(values)}")
    return tuple(map(float, listed))


def _dataset(source: Any, model: Any, n: int | None) -> Any:
    """A data set as a suite names it; arrays and objects are registered under a name with their fingerprint."""
    is_call = isinstance(source, Mapping) and not hasattr(source, "column_names")  # a DatasetDict is a Mapping, too
    if source is None or isinstance(source, str) or is_call:
        return source
    from fatbench.data import Dataset, own_objects

    data = own_objects.dataset(source, n, lambda x: _classes(model, x))
    if not isinstance(data, Dataset):
        raise SpecError(f"dataset: expected a name, (x, y), a Dataset or a DataLoader, got a {type(source).__name__}")
    word = "".join(letter if letter.isalnum() else "_" for letter in data.name).strip("_") or "arrays"
    return registered.keep("Data", f"{word}_{data.fingerprint[:8]}", data)


def _classes(model: Any, x: Any) -> int | None:
    """The number of a model's classes, from its logits on x; None if it cannot be called so."""
    import torch

    if not callable(model):
        return None
    modes = [(module, module.training) for module in model.modules()] if isinstance(model, torch.nn.Module) else []
    device = next(model.parameters(), torch.zeros(0)).device if isinstance(model, torch.nn.Module) else "cpu"
    try:
        for module, _ in modes[:1]:  # the first is the model itself, whose eval() reaches the others
            module.eval()
        with torch.no_grad():
            return int(model(torch.as_tensor(x).float().to(device)).shape[1])
    except Exception:  # the model's own code: `evaluate` says what is wrong with it
        return None
    finally:
        for module, training in modes:
            module.training = training


def _attacks(attacks: Any, model: Any) -> list[str | tuple[str, Any]] | None:
    """Attacks as `external_models.read_attack` takes them: text, or (label or "", a mapping)."""
    if attacks is None:
        return None
    if isinstance(attacks, Mapping) and "name" not in attacks:  # label -> attack
        return [(str(label), _pair(attack, model)[1]) for label, attack in attacks.items()] or ["natural"]
    # [] asks for no attack: natural accuracy alone
    is_one = isinstance(attacks, str | Mapping) or callable(attacks) or not isinstance(attacks, Iterable)
    listed = [attacks] if is_one else list(attacks) or ["natural"]
    return [attack if isinstance(attack, str) else _pair(attack, model) for attack in listed]


def _pair(attack: Any, model: Any) -> tuple[str, Any]:
    """(the label of a function or "", an attack's name, or a mapping with it); a function is registered."""
    if isinstance(attack, str):
        return "", attack
    if isinstance(attack, Mapping):
        return "", dict(attack)
    if not callable(attack):
        raise SpecError(f"attacks: expected names, mappings or functions (model, x, y), got {shown(attack)}")
    if type(attack).__module__.partition(".")[0] == "torchattacks":
        return "", _torchattacks(attack, model)
    label, name = registered.attack(attack)
    return label, {"name": name}


def _torchattacks(attack: Any, model: Any) -> dict[str, Any]:
    """The settings of an attack object of torchattacks. SpecError: it attacks another model, or normalised images."""
    kind = type(attack).__name__
    if attack.model is not model:
        made_for = "was made for another model: give it the one that is evaluated"
        raise SpecError(f"attacks: this torchattacks.{kind} {made_for}")
    if getattr(attack, "targeted", False) or getattr(attack, "normalization_used", None):
        raise SpecError(f"attacks: torchattacks.{kind}: without targets, and on a model that normalises inside itself")
    # torchattacks keeps an argument as an attribute of the same name
    names = [name for name in inspect.signature(type(attack)).parameters if name not in ("model", "device", "seed")]
    values = {name: getattr(attack, name, None) for name in names}
    settings = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
    return {"name": "torchattacks", "attack": kind, **settings}
