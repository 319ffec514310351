"""What cannot be in the document of a cell, because its parts contradict each other or its digests.

An accuracy under attack is stored twice, as a number and as one bit for each test image; the bits decide. The best
round, too, is stored twice: as a record and as the largest number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from fatbench.errors import FatbenchError, UnknownName
from fatbench.store import selection
from fatbench.store.document import Cell, Numbers, Stage, digest, shorten
from fatbench.store.stage_names import parsed

Identify = Callable[[Mapping[str, Any]], str]
Contradiction = Callable[[Stage], str | None]

# accuracies and fractions, besides the metrics that evaluations are named after
UNSEEN = "unseen_accuracy"  # of clients that never train, on their own images
OF_HELD_OUT = {"holdout_accuracy", "holdout_natural"}
FRACTIONS = {"train_accuracy", "natural", "val_natural", "monitor", "val_monitor", "natural_class", "monitor_class",
             "val_natural_class", "val_monitor_class", "edge_natural", *OF_HELD_OUT, "prior_accuracy", UNSEEN,
             "zero_gradients", "directional", "chance"}  # fmt: skip
OF_TEST_IMAGES = {"natural", "monitor", "edge_natural"}  # besides the metrics that evaluations are named after
OF_CLIENTS = {"train_loss", "train_accuracy", "weight", "selected", *OF_HELD_OUT, "holdout_gap",
              "prior_accuracy", UNSEEN}  # fmt: skip
COUNTS = {"seconds", "forward", "backward", "gradient_steps", "bytes_up", "bytes_down"}
MEANS = FRACTIONS - {"train_accuracy", *OF_HELD_OUT, "prior_accuracy", UNSEEN, "edge_natural"}  # of one bit an image
CLASSES = {f"{metric}_class": metric for metric in ("natural", "monitor", "val_natural", "val_monitor")}
ROUNDING = 1e-12  # of a mean of several models' accuracies: far below one image of any test set
FINEST = 1e-6  # of an image: the rounding error of a count of images
APART = 0.02  # by which two passes over the same images may differ, in other batches or precisions


def count_correct(chunks: Iterable[tuple[int, bytes]]) -> tuple[int, int]:
    """(images classified correctly, images) of packed outcomes [(how many, bits)]."""
    correct = total = 0
    for n, bits in chunks:
        correct += int.from_bytes(bits).bit_count()
        total += n
    return correct, total


def impossible(metric: str, value: float, n: int, models: int = 1) -> str | None:
    """The reason why n outcomes of each of some models cannot have this mean; None if they can."""
    if n < 1 or abs(value * n * models - round(value * n * models)) <= FINEST:
        return None
    models_text = f" and {models} models" if models > 1 else ""
    return f"{metric} is {value!r}, which {n} images{models_text} cannot give"


def disagreement(metric: str, value: float, n: int, correct: int, total: int) -> str | None:
    """How an accuracy over n images contradicts its outcomes, `correct` of `total` with n for each model.

    None if it agrees, or without outcomes.
    """
    if not 0 <= value <= 1:
        return f"{metric} is {value!r}: not in [0, 1]"
    if not total:
        return None
    if n < 1 or total % n:
        return f"{metric} is of {n} images, its outcomes are of {total}"
    if abs(value - correct / total) > ROUNDING:
        return f"{metric} is {value!r}, its outcomes say {correct / total!r} ({correct} of {total})"
    return None


def mean_over_own_images(n: int, of_clients: Sequence[tuple[float, int]]) -> float | None:
    """The mean of clients' accuracies [(value, images)] if each has its own images, n in all; None: n are shared."""
    own = len(of_clients) > 0 and n == sum(images for _, images in of_clients)
    return sum(value for value, _ in of_clients) / len(of_clients) if own else None


def problems(
    cell: Cell, identify: Identify | None = None, contradiction: Contradiction | None = None
) -> Iterator[tuple[str, str]]:
    """(stage, or empty for the whole cell; what is wrong) of all that cannot be in a document that fatbench wrote.

    identify: computes the identity of a spec, which must be the cell's id. contradiction: describes how a stage's name
    contradicts its settings, or returns None (`fatbench.suite.asked`).
    """
    if identify is not None:
        try:
            if (identity := identify(cell.spec)) != cell.cell:
                yield "", f"its id does not match its settings ({identity}): was it edited?"
        except (FatbenchError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            yield "", f"{shorten(str(error))}{_plugin_hint(cell, error)}"
    if structural := list(misfits(cell)):
        yield from structural
        return
    for stage in cell.stages:
        if (problem := _stage_problem(cell, stage, contradiction)) is not None:
            yield stage.stage, problem
    if problem := _training_contradiction(cell):
        yield "train", problem
    for stage in cell.stages:
        if stage.status == "done" and stage.digest is None:
            yield stage.stage, "a finished stage has no digest: was it edited?"
        elif stage.status == "done" and stage.digest != digest(cell, stage):
            yield stage.stage, "its digest does not match its numbers or outcomes: was it edited?"


def _plugin_hint(cell: Cell, error: Exception) -> str:
    """The part of a message that names the plug-in from which a cell's runs had an unknown name."""
    records = (record for run in cell.runs for record in run.extra.get("plugins", ()))
    names = {
        f"{record['plugin']} (sha256 {record['sha256'][:12]})"
        for record in records
        if isinstance(error, UnknownName) and error.entry in record["names"]
    }
    return f"; its runs used the plug-in {' and '.join(sorted(names))}: pass it with --plugin" if names else ""


def misfits(cell: Cell) -> Iterator[tuple[str, str]]:
    """(stage or empty, parts of a document that do not fit together)."""
    names = {"run": [run.uid for run in cell.runs], "stage": [stage.stage for stage in cell.stages]}
    for kind, known in names.items():
        yield from (("", f"{kind} {key} occurs twice") for key, count in Counter(known).items() if count > 1)
    for stage in cell.stages:
        runs = {block[4] for block in stage.numbers} | (set() if stage.run is None else {stage.run})
        for run in sorted(runs):
            if run >= len(cell.runs):
                yield stage.stage, f"run {run} does not exist"
                return
        last_round = -1
        for round, blocks in groupby(stage.numbers, lambda block: block[0]):
            keys = [(round, client, metric) for block in blocks for metric in block[3] for client in block[1]]
            if round < last_round:
                yield stage.stage, f"the numbers of round {round} follow those of round {last_round}"
            last_round = round
            if len(set(keys)) < len(keys):
                yield "", f"number {min(key for key, count in Counter(keys).items() if count > 1)} occurs twice"
        position = 0
        try:
            chunks = stage.chunks
        except ValueError as error:
            yield stage.stage, f"outcomes: {error}"
            continue
        for start, n, bits in chunks:
            if start != position or len(bits) != (n + 7) // 8:
                yield stage.stage, f"the outcomes from {start} on do not fit"
            position += n


def _stage_problem(cell: Cell, stage: Stage, contradiction: Contradiction | None) -> str | None:
    """The first contradiction of a stage in itself or to its cell, or None."""
    outcomes = sum(n for _, n, _ in stage.outcomes)
    if problem := _number_problem(cell.spec, stage):
        return problem
    if stage.stage != "train" and outcomes not in (0, stage.round):
        return f"{outcomes} outcomes of {stage.round} examples"
    if stage.status == "done" and (problem := _record_problem(cell.spec, stage)):
        return problem
    if stage.run is not None and cell.runs[stage.run].stage != stage.stage:
        return f"its run is one of {cell.runs[stage.run].stage}"
    return None if contradiction is None else contradiction(stage)


def _training_contradiction(cell: Cell) -> str | None:
    """How the clean accuracy logged in training contradicts the evaluation of the same round and images.

    Both are over the first test images. A training that diverged is skipped: there they are the most frequent class.
    """
    training = cell.by_stage.get("train")
    clean = training.rows.of("natural") if training is not None else ()
    logged = {round: (value, n) for round, client, _, value, n, *_ in clean if client < 0}
    for stage in cell.stages:
        name, settings = parsed(stage.stage), stage.settings or {}
        if settings.get("name") != "natural" or {"origin", "on"} & settings.keys() or name.round not in logged:
            continue
        images_by_metric = {metric: n for _, client, metric, _, n, *_ in stage.rows if client < 0}
        bits, n = stage.bits, images_by_metric.get(name.metric, 0)
        value, logged_images = logged[name.round]
        if "doubt_diverged" in images_by_metric or not 0 < logged_images <= n or len(bits) % n:
            continue
        correct = sum(bits[start : start + logged_images].count("1") for start in range(0, len(bits), n))
        accuracy = correct / (logged_images * (len(bits) // n)) if bits else value
        if abs(accuracy - value) > APART:
            return (
                f"natural of round {name.round} is {value!r}, {stage.stage} says {accuracy!r} of the same "
                f"{logged_images} images"
            )
    return None


def _record_problem(spec: Mapping[str, Any], stage: Stage) -> str | None:
    """How the last and the best rounds recorded in a finished training contradict the cell or its numbers, or None."""
    rounds, last_round = _bound(spec, *BOUNDS[0]), (stage.record.get("last") or {}).get("round", stage.round)
    if stage.stage == "train" and rounds is not None and (stage.round, last_round) != (rounds, rounds):
        return f"finished in round {last_round if stage.round == rounds else stage.round} of {rounds}"
    for name, metric in selection.MONITORED.items():
        if (best_record := stage.record.get(name)) is None:
            continue
        series = {round: value for round, client, _, value, *_ in stage.rows.of(metric) if client < 0}
        best = selection.checkpoint_round(series)
        if best is not None and (best_record["round"], best_record.get("value")) != (best, series[best]):
            chosen_round = f"{name} is {best_record.get('value')!r} in round {best_record['round']}"
            return f"{chosen_round}, the best {metric} {series[best]!r} in round {best}"
    return None


def _number_problem(spec: Mapping[str, Any], stage: Stage) -> str | None:
    """The first impossible number among a stage's numbers and outcomes, or None."""
    last_round, clients, images = (_bound(spec, *keys) for keys in BOUNDS)
    numbers, chunks = stage.rows, [(n, bits) for _, n, bits in stage.chunks]
    own = "on" in (stage.settings or {})  # each client has its own images
    metric, _, _, stage_round = parsed(stage.stage)
    evaluation = stage.stage != "train"
    if evaluation and last_round is not None and stage_round > last_round:
        return f"round {stage_round} of {last_round}"
    correct, total = count_correct(chunks)
    of_clients = Counter[tuple[str, int]]()
    for round, name, owners, *_ in numbers.series():
        of_clients[name, round] += sum(client >= 0 for client in owners)
    models = of_clients[metric, stage_round] or 1
    stage_rows = sorted([*numbers.of(metric), *(numbers.of(UNSEEN) if own else ())])
    seen = [(value, n) for _, client, name, value, n, *_ in stage_rows if name == metric and client >= 0]
    all_images = next((n for _, client, name, _, n, *_ in stage_rows if name == metric and client < 0), 0)
    own_mean = mean_over_own_images(all_images, seen) if own else None
    for round, name, owners, values, sizes, *_ in numbers.series():
        of_stage = evaluation and name == metric
        is_fraction, is_of_images = of_stage or name in FRACTIONS, of_stage or name in OF_TEST_IMAGES
        is_of_client = (of_stage or name in OF_CLIENTS) and clients is not None
        is_mean = not total if of_stage else name in MEANS
        of = metric if name == "zero_gradients" else CLASSES.get(name, name)  # a mean over the same models
        for client, value, n in zip(owners, values, sizes, strict=True):
            subject = f"{name} of client {client}" if client >= 0 else name
            if (of_stage and round != stage_round) or (last_round is not None and round > last_round):
                return f"{subject} is of round {round}" + (
                    f", the stage of round {stage_round}" if of_stage else f" of {last_round}"
                )
            if is_fraction and not 0 <= value <= 1:
                return f"{subject} is {value!r}: not in [0, 1]"
            if value < 0 and name in COUNTS:
                return f"{subject} is {value!r}: below 0"
            if client < -1:
                return f"{name} of client {client}: clients are counted from 0"
            if is_of_client and client >= clients:
                return f"{subject}: the cell has {clients} clients"
            if is_of_images and n < 1:
                return f"{subject} is over no images"
            if own_mean is not None and of_stage and client < 0:
                if abs(value - own_mean) > ROUNDING:
                    return f"{subject} is {value!r}, the mean of its clients' is {own_mean!r}"
                continue
            if is_of_images and images is not None and n > images and own_mean is None:
                return f"{subject} is of {n} images, the cell has {images}"
            if of_stage and client < 0 and (problem := disagreement(name, value, n, correct, total)):
                return problem
            if of_stage and client < 0 and total and n * models != total:
                return (
                    f"{subject} is of {n} images and {models} model{'s' * (models != 1)}, its outcomes are of {total}"
                )
            models_averaged = 1 if client >= 0 and name not in CLASSES else of_clients[of, round] or 1
            if is_mean and (problem := impossible(subject, value, n, models_averaged)):
                return problem
    if problem := _class_contradiction(numbers):
        return problem
    return _client_contradiction(metric, stage_rows, chunks) if evaluation else None


def _class_contradiction(numbers: Numbers) -> str | None:
    """How the accuracies by class contradict that of all images, or None."""
    for name, of in CLASSES.items():
        classes: dict[int, list[tuple[float, int]]] = {}
        for round, _, _, value, n, *_ in numbers.of(name):
            classes.setdefault(round, []).append((value, n))
        overall = {round: (value, n) for round, client, _, value, n, *_ in numbers.of(of) if classes and client < 0}
        for round, accuracies in classes.items():
            value, n = overall.get(round, (0.0, 0))
            correct, images = sum(accuracy * images for accuracy, images in accuracies), sum(n for _, n in accuracies)
            if n == images and abs(correct - value * n) > FINEST * len(accuracies):
                return f"{of} of round {round} is {value!r}, its classes say {correct / n!r}"
    return None


BOUNDS = (("algorithm", "rounds"), ("partition", "clients"), ("test",))


def _bound(spec: Mapping[str, Any], *keys: str) -> int | None:
    """An integer setting of the spec, or None."""
    value: Any = spec
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _client_contradiction(
    metric: str, numbers: Sequence[Sequence[Any]], chunks: Sequence[tuple[int, bytes]]
) -> str | None:
    """How the clients' accuracies, in their order, contradict the outcomes of their models, or None."""
    client_rows = [row for row in numbers if row[1] >= 0]
    if not client_rows or not chunks:
        return None
    bits = "".join(f"{int.from_bytes(data):0{8 * len(data)}b}"[:n] for n, data in chunks)
    if sum(row[4] for row in client_rows) != len(bits):
        return f"{metric} has {len(client_rows)} clients, its {len(bits)} outcomes do not fit them"
    start = 0
    for _, client, _, value, n, *_ in client_rows:
        correct = bits[start : start + n].count("1")
        if problem := disagreement(f"{metric} of client {client}", value, n, correct, n):
            return problem
        start += n
    return None
