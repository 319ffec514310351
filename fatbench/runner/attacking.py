"""The attacks on a cell's models: every evaluation that a suite asks for, on every checkpoint, image by image kept."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from fatbench.engine.rounds import Number
from fatbench.errors import MachineError
from fatbench.runner import checkpoints, transfer, versions
from fatbench.runner.checkpoints import clients_file, model_file
from fatbench.runner.jobs import WORSE, CellStatus, Event, Job, Machine, evaluation_rounds
from fatbench.runner.oom_retry import with_oom_retry
from fatbench.runner.stage import claim, failed, ready_for, renewed, with_some_kernel
from fatbench.store.stages import Store
from fatbench.suite import formulas, plugins, signatures
from fatbench.suite.cells import Evaluation

log = logging.getLogger("fatbench")

LOOKED_AT = 1000  # first test images whose loss gradients are looked at: one of each image costs twice its accuracy


def attack_models(
    job: Job, machine: Machine, store: Store, folder: Path, notify: Any, stop: Any, again: bool, ready: Any = None
) -> CellStatus:
    """Every evaluation of the job that is not done; one that fails leaves the others to run.

    Done means done on the model that is here: one trained again elsewhere can differ. DamagedCheckpoint: a model
    trained here is lost or damaged; with `again`, after it was trained anew, that is a failure like any other.
    """
    from fatbench.methods.packages import implementation

    rows = store.stages([job.cell])
    record = rows[(job.cell, "train")].record
    worst: CellStatus = "done"
    lacking: dict[str, str] = {}  # cells whose models are waited for
    other = versions.changed([job], store).get(job.cell, {})
    shared: dict[str, Any] = {} if ready is None else {"ready": ready, "microbatch": machine.microbatch}
    rounds, trained_by = evaluation_rounds(job, record), plugins.files(job.spec)
    foreign = {one.id: bool(plugins.files(job.spec, [one]) - trained_by) for one in job.evaluations}
    order = [(round, one) for round in rounds for one in job.evaluations]
    order.sort(key=lambda pair: foreign[pair[1].id])  # what an attack's plug-in does to torch, the others do not meet
    for round, evaluation in order:
        digest = record.get("sha256", {}).get(model_file(round))  # none: the model was never here
        stage = evaluation.stage(round)
        row = rows.get((job.cell, stage))
        if stage in other and not machine.rerun_changed:
            continue
        origin = evaluation.origin
        theirs = transfer.trained(origin.cell, store) if origin is not None and origin.cell else None
        if row is not None and row.status == "done" and stage not in other:
            same = digest is None or row.record.get("model", digest) == digest
            if same and (theirs is None or row.record.get("origin", theirs.digest) == theirs.digest):
                continue
            store.reopen(job.cell, stage)
        if origin is not None and origin.cell and theirs is None:
            lacking[origin.cell] = origin.name
            continue
        settings = {**evaluation.attack, "implementation": implementation(evaluation.attack["name"])}
        settings |= {"origin": origin.said} if origin is not None else {}
        run = claim(job, stage, machine, store, 0, evaluation, settings, fresh=stage in other)
        if run is None:
            free: CellStatus = "failed" if row is not None and row.status == "failed" else "elsewhere"
            worst = max(worst, free, key=WORSE.index)
            continue
        try:
            ours = record.get("sha256", {}).get(clients_file(round))
            there = theirs or transfer.Trained(job.cell, round, clients_file(round), ours)
            stage_of = partial(
                _attack, run, round, digest, evaluation, there, job,
                store=store, folder=folder, shared=shared, notify=notify, stop=stop,
            )  # fmt: skip
            attempt = partial(with_some_kernel, run, store=store, stage=stage_of)
            with renewed(machine, run):
                status = with_oom_retry(attempt, machine, evaluation.batch, partial(store.describe_run, run))
        except BaseException as error:
            if isinstance(error, checkpoints.DamagedCheckpoint) and digest is not None and not again:
                store.release(run)
                raise
            status = failed(error, run, job, stage, store, notify)
        if status in ("interrupted", "blocked"):
            return status
        worst = max(worst, status, key=WORSE.index)
    if lacking and worst == "done":
        of = ", ".join(f"{cell} ({name})" for cell, name in lacking.items())
        notify(Event(job.cell, "transfer", "waiting", message=f"for the model of {of}, which is not trained yet"))
        return "waiting"
    return worst


def _attack(
    run: int,
    round: int,
    digest: str | None,
    evaluation: Evaluation,
    there: transfer.Trained,
    job: Job,
    machine: Machine,
    store: Store,
    folder: Path,
    shared: dict[str, Any],
    notify: Any,
    stop: Any,
) -> CellStatus:
    import torch

    from fatbench.engine import microbatch
    from fatbench.engine.accuracy import attacked, models_of, packed, prior_accuracy, unpacked, zero_gradients
    from fatbench.methods.packages import implementation

    stage = evaluation.stage(round)
    file = folder / model_file(round)
    if digest is None and not file.exists():
        raise MachineError(
            f"the model of round {round} is not here ({file}): its results were imported, or it was removed. Copy it"
            f" from where it was trained; or, to train it here, fatbench delete {job.cell} and run the suite again;"
            " this deletes the imported numbers"
        )
    rows = store.stages([job.cell])
    if digest is None:  # imported numbers say which model they are of, so that no other file is taken for it
        of_round = (row.record for (_, attack), row in rows.items() if attack.endswith(f"@{round}"))
        digest = next((record["model"] for record in of_round if "model" in record), None)
    if "ready" not in shared:
        shared["ready"], shared["microbatch"] = ready_for(job, machine)[1], machine.microbatch
    ready = shared["ready"]
    if machine.microbatch and machine.microbatch != shared["microbatch"]:  # memory was not enough
        microbatch.bound(ready.problem.model, machine.microbatch)
        shared["microbatch"] = machine.microbatch
    if shared.get("round") != round:
        model, own, _ = checkpoints.load_model(file, machine.device, digest, job.cell, round)
        shared["models"], shared["round"] = models_of(model, own), round
    models = shared["models"]
    pairs = transfer.pairs(evaluation.origin, there, models, ready, machine, shared)
    record = {} if digest is None else {"model": digest}
    record |= {"origin": there.digest} if evaluation.origin is not None and there.digest else {}
    begun = rows[(job.cell, stage)]
    if begun.round and any(begun.record.get(which) != file_digest for which, file_digest in record.items()):
        store.restart(run)  # what is done of it is about a model that is gone, or never was here
    images, labels = ready.test[0][: evaluation.n], ready.test[1][: evaluation.n]
    n = len(labels)
    total = n * len(pairs)
    said: dict[str, Any] = {"data": ready.data, "attack": implementation(evaluation.attack["name"])}
    said |= {"microbatch": shared["microbatch"]} if shared["microbatch"] else {}
    store.describe_run(run, said, total=total)
    done = store.outcomes(job.cell, stage)
    bits = [torch.from_numpy(unpacked(data, length)) for _, length, data in done]
    position = sum(len(b) for b in bits)
    notify(Event(job.cell, stage, "start", position, total))
    attack = signatures.build("Attack", evaluation.attack)
    cost = sum(formulas.passes("Attack", evaluation.attack)) + 1
    begin = time.perf_counter()
    for place, pair in enumerate(pairs):  # all images on one model, then on the next
        first = place * n
        if position >= first + n:
            continue
        chunks = attacked(
            ready.problem, pair.judged, images, labels, attack, ("evaluate", evaluation.id, round, *pair.key),
            batch=evaluation.batch, start=position - first, origin=pair.origin,
        )  # fmt: skip
        for start, correct, _ in chunks:
            bits.append(correct)
            position = first + start + len(correct)
            chunk = (first + start, len(correct), packed(correct))
            store.commit(run, round=position, outcomes=chunk, record=record)
            so_far = sum(int(part.sum()) for part in bits) / position
            notify(Event(job.cell, stage, "progress", position, total, cost * len(correct), accuracy=so_far))
            if position < total and stop():
                store.release(run)
                notify(Event(job.cell, stage, "interrupted", position, total))
                return "interrupted"
    each = torch.cat(bits).reshape(len(pairs), n)
    right = each.double().mean(1)
    value = float(right.mean())
    numbers = [Number(evaluation.label, value, round, n=n), Number("seconds", time.perf_counter() - begin, round)]
    if len(pairs) > 1 or pairs[0].client >= 0:
        numbers += [Number(evaluation.label, float(v), round, n, p.client) for p, v in zip(pairs, right, strict=True)]
    if evaluation.origin is not None:
        return _finished(run, numbers, record, job, stage, store, notify, total)
    fractions = [ready.problem.labels[shard] for shard in ready.problem.shards]
    by_client = prior_accuracy({k: each[place] for place, k in enumerate(models)}, labels, fractions, ready.classes)
    numbers += [Number("prior_accuracy", v, round, n, k) for k, v in by_client.items()]
    if formulas.formula("Attack", evaluation.attack, "Forward") == 0:  # the images are as they were
        few, truth = images[:LOOKED_AT], labels[:LOOKED_AT]
        dead = [zero_gradients(ready.problem, model, few, truth) for model in models.values()]
        numbers.append(Number("zero_gradients", sum(dead) / len(dead), round, n=len(truth)))
        numbers.append(Number("chance", float(labels.bincount().max()) / n, round, n=n))
    if "evaluated" in job.spec:
        numbers += _doubts(job, ready.problem, models[-1], images, round)
    return _finished(run, numbers, record, job, stage, store, notify, total)


def _finished(
    run: int, numbers: list[Number], record: dict[str, Any], job: Job, stage: str, store: Store, notify: Any, total: int
) -> CellStatus:
    store.finish(run, numbers, record=record)
    log.info("%s: %s=%.6f on %d images", stage, numbers[0].metric, numbers[0].value, numbers[0].n)
    notify(Event(job.cell, stage, "done", total, total))
    return "done"


def _doubts(job: Job, problem: Any, model: Any, images: Any, round: int) -> list[Number]:
    """What is doubtful about a model that was not trained here, as numbers that the report shows as flags."""
    from fatbench.engine import plausible

    found = plausible.doubts(problem, model, images, job.spec["evaluated"]["outputs"])
    return [Number(f"flag_{words.replace(' ', '_')}", 1.0, round) for words in found]
