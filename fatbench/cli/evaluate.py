"""`fatbench evaluate`: attack a saved model, a run's or one that was trained elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fatbench import settings, whole_file
from fatbench.cli import options as opt
from fatbench.cli.options import Argument, Option
from fatbench.cli.shared import attack_list, known_format, mapping, plan_of, print_json
from fatbench.errors import Doubtful, SpecError, did_you_mean
from fatbench.runner.run_options import RunOptions, run_options
from fatbench.store.opening import opened
from fatbench.store.stage_names import parsed

if TYPE_CHECKING:
    from fatbench.report.numbers.doubts import Doubt
    from fatbench.suite.cells import Plan


MODEL = ("name", "outputs", "channels", "size", "entry")  # what {...} of --model may say
BATCH = 500  # images at once, where run.microbatch does not say


def evaluate(
    file: Annotated[
        Path,
        Argument(
            metavar="FILE", help="A checkpoint of a run, or a state dict (.pt, .safetensors).", show_default=False
        ),
    ],
    model: opt.Model = None,
    mean: opt.Mean = None,
    std: opt.Std = None,
    dataset: Annotated[
        str | None, Option("--dataset", metavar="DATA", help="The data set, written as in a suite file.")
    ] = None,
    like: opt.Like = None,
    preset: opt.Preset = None,
    where: opt.Where = None,
    attack: opt.Attacks = None,
    eps: Annotated[
        str | None,
        Option("--eps", metavar="R", help="Radius of attacks that state none; default: that of training, else 8/255."),
    ] = None,
    images: opt.Images = None,
    name: Annotated[
        str | None, Option("--name", metavar="NAME", help="Row name in tables; default: the file name.")
    ] = None,
    expect_natural: Annotated[
        float | None,
        Option(
            "--expect-natural", metavar="X", min=0, max=100,
            help="Natural accuracy (%) that you measured; no attack runs if it differs here.",
        ),
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 6 if a number is doubtful.")] = False,
    device: opt.Device = None,
    precision: opt.Precision = None,
    format: opt.Format = "text",
) -> None:  # fmt: skip
    """Attack a saved model: a run's checkpoint, or one trained elsewhere.

    --model '{name: timm/resnet18, size: 224}' resizes images to 224. Besides size, it takes outputs (logits,
    probabilities, sigmoid), channels (rgb, bgr) and entry (which state, if the file has several). --images N takes the
    first N test images; --like takes images and attacks of a suite's cells.

    Example: fatbench evaluate net.pt --model net.py:Net --dataset cifar10 --eps 8/255 --images 1000
    """
    known_format(format, ("text", "json"))
    if expect_natural is not None and 0 < expect_natural <= 1:
        raise SpecError(f"expected per cent such as 95 (and not 0.95), got {expect_natural:g}", option="expect-natural")
    attacks, batch = attack_list(attack), settings.number("run.microbatch") or BATCH
    file = whole_file.regular(file)  # of the hub, or a pipe
    options = run_options(device=device, precision=precision, data=settings.given("data"))
    if like is None and (preset or where):
        raise SpecError("--preset and -k need a suite: name it with --like NAME")
    plan = None
    if model is None:
        from fatbench.runner import checkpoints

        # every model of a run ends so
        if file.is_file() and (file.suffix != ".safetensors" or checkpoints.is_state_dict(file)):
            other = "a state dict needs --model timm/NAME or --model FILE.py:FUNCTION"
            raise SpecError(f"{file} is no checkpoint of a run; {other}")
        of_a_state_dict = {
            "--dataset": dataset, "--mean": mean, "--std": std, "--name": name, "--expect-natural": expect_natural,
            "--strict": strict or None,
        }  # fmt: skip
        misplaced = [option for option, value in of_a_state_dict.items() if value is not None]
        if misplaced and file.is_file():
            raise SpecError(
                f"{file}: without --model it is read as a checkpoint of a run, which has its own settings: leave out"
                f" {', '.join(misplaced)}, or name a state dict's network with --model timm/NAME or FILE.py:FUNCTION"
            )
        if like is not None:
            plan = plan_of(like, preset, where)[1]
        _checkpoint(file, plan, attacks, eps, images, batch, options, format)
        return
    network = mapping("--model", model)
    if unknown := next((key for key in network if key not in MODEL), None):
        raise SpecError(f"unknown setting '{unknown}'{did_you_mean(unknown, MODEL)}", option="model")
    from fatbench import api
    from fatbench.runner import evaluate_external
    from fatbench.suite.external_models import ROUND
    from fatbench.suite.standard_attacks import DEFAULT_RADIUS

    if like is not None:
        plan = plan_of(like, preset, where)[1]
    data = mapping("--dataset", dataset) if dataset and "{" in dataset else dataset
    eps, size = eps or DEFAULT_RADIUS, network.get("size")
    task = evaluate_external.task(plan, data, attacks, eps=eps, n=images, batch=batch, size=size)
    preprocessing = {"mean": numbers("--mean", mean), "std": numbers("--std", std)}
    preprocessing |= {key: network.get(key, default) for key, default in (("outputs", "logits"), ("channels", "rgb"))}
    source = evaluate_external.from_file(file, str(network["name"]), name, network.get("entry"), **preprocessing)
    if source.note:
        print(f"fatbench: {source.note}", file=sys.stderr)
    expected_natural = None if expect_natural is None else expect_natural / 100
    cell, status = api.attack_and_store(source, task, options, _say, expected_natural, in_percent=True)
    doubts = _show(cell, {stage: item.attack for item in task.evaluations for stage in item.stages(ROUND)}, format)
    if status != "done":
        print(f"fatbench: {cell}: {status} (fatbench show {cell} --log)", file=sys.stderr)
        raise typer.Exit(1)
    if strict and doubts:
        raise Doubtful(f"{cell}: {'; '.join(doubts)}", option="strict")


def _show(cell: str, attack_by_stage: Mapping[str, Any], format: str) -> list[str]:
    """The numbers of a cell, the robust accuracy first, and on stderr what is doubtful: what `--strict` ends at.

    attack_by_stage: stage -> attack of those that a text shows; JSON has all attacks on the model.
    """
    from fatbench import report as reporting
    from fatbench.report.numbers import stored
    from fatbench.report.numbers.doubts import MEASURED_WELL, in_words
    from fatbench.report.tables.external_suite import split_note, suite_and_plan
    from fatbench.suite.standard_attacks import strength

    with opened(None) as store:
        assert store is not None
        doubts_by_stage = stored.doubts_of([cell], store)
        if format == "json":
            suite, plan = suite_and_plan(store, f"id={cell}")
            grids = reporting.build_tables(suite, plan, store)
        else:
            numbers = stored.accuracies([cell], store, attack_by_stage)
            spec = store.cells([cell])[cell]
    all_doubts = dict.fromkeys(doubt for doubts in doubts_by_stage.values() for doubt in doubts)
    doubts = advised(all_doubts)
    if format == "json":
        import json

        print_json({"cell": cell, "doubts": doubts, **json.loads(reporting.render(grids, "json"))})
    else:
        from fatbench.cli import show

        rows = [
            {
                "label": parsed(stage).metric,
                "attack": attack_by_stage[stage],
                "accuracy": accuracy,
                "n": n,
                "doubts": in_words(doubts_by_stage.get((cell, stage), ())),
            }
            for (_, stage), (accuracy, n) in numbers.items()
        ]
        rows.sort(key=lambda row: strength(row["label"]))
        show.evaluation(rows, f"{spec['evaluated']['name']} on {spec['data']['name']}")
        print(f"cell {cell}: fatbench show {cell}; fatbench report evaluate has all models")
        if note := split_note(spec["data"]["name"]):
            print(note)
    for line in doubts:
        print(f"fatbench: {line}", file=sys.stderr)
    return in_words(doubt for doubt in all_doubts if doubt.code not in MEASURED_WELL)


AT_CHANCE = "no better than guessing the most frequent class; "


def advised(doubts: Iterable[Doubt]) -> list[str]:
    """Each doubt about a model in words, a sentence each, with what to do about it where that is known."""
    from fatbench.api import CHECK
    from fatbench.engine.plausible import ADVICE
    from fatbench.report.numbers.doubts import Doubt, in_words

    advice = {**ADVICE, Doubt("chance").words: AT_CHANCE + CHECK}
    return [f"{words}: {advice[words]}" if words in advice else words for words in in_words(doubts)]


def _checkpoint(
    file: Path,
    plan: Plan | None,
    attack: list[str],
    eps: str | None,
    n: int | None,
    batch: int,
    options: RunOptions,
    format: str,
) -> None:
    """A model that a run has written: its settings are in it."""
    from fatbench.report.numbers.doubts import Doubt, in_words
    from fatbench.runner import evaluate_checkpoint as evaluating

    results = evaluating.checkpoint(file, evaluating.evaluations(file, plan, attack, eps, n, batch), options)
    for row in results:
        row["doubts"] = in_words(Doubt(kind.replace(" ", "_"), amount) for kind, amount in row["doubts"].items())
    if format == "json":
        print_json({"checkpoint": str(file), "results": results})
    else:
        from fatbench.cli import show

        show.evaluation(results, file.name)
    for row in results:
        for words in row["doubts"]:
            print(f"fatbench: {row['label']}: {words}", file=sys.stderr)


def numbers(option: str, text: str | None) -> tuple[float, ...]:
    """What --mean or --std says, one for each channel. SpecError: no numbers, or a deviation that is not positive."""
    try:
        values = tuple(float(field) for field in (text or "").split(",") if field.strip())
    except ValueError:
        raise SpecError(f"{option}: expected numbers such as 0.5,0.5,0.5, got '{text}'") from None
    if option == "--std" and not all(0 < value < float("inf") for value in values):
        raise SpecError(f"must be positive, got '{text}'", option="std")
    return values


def _say(event: Any) -> None:
    """A line for each attack that begins, and what a person should know; on a terminal also how far it is."""
    if event.message and event.kind != "progress":
        about = "" if event.stage == "cell" else f"{event.cell} {event.stage} {event.kind}: "
        print(f"fatbench: {about}{event.message}", file=sys.stderr)
        return
    metric = event.stage.split("-")[0]
    if event.kind == "start":
        print(f"attack {metric}", file=sys.stderr, flush=True)
    elif event.kind == "progress" and sys.stderr.isatty():
        so_far = "" if event.accuracy is None else f", {100 * event.accuracy:.1f} % right so far"
        phase = f", {event.message}" if event.message else ""
        said = f"\x1b[2Kattack {metric}: {event.round} of {event.total}{phase}{so_far}"
        print(said, end="\r", file=sys.stderr, flush=True)
