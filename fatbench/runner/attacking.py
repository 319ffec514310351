"""Run every evaluation that a suite asks for on every checkpoint of a cell, and store the outcome of each image."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fatbench.engine.rounds import Number
from fatbench.errors import MachineError, SpecError
from fatbench.runner import checkpoints, transfer, versions
from fatbench.runner.checkpoints import clients_file, model_file
from fatbench.runner.jobs import WORSE, CellStatus, Event, Job, Machine, Turn, evaluation_rounds
from fatbench.runner.stage import Reader, carry_out, claim, demand_same_inputs, ready_for
from fatbench.store import doubt_names
from fatbench.store.doubt_names import IN_ROUNDS, PREFIX
from fatbench.store.problems import UNSEEN
from fatbench.suite import calls, cells, cost, facts, plugins, weights
from fatbench.suite.cells import Evaluation
from fatbench.suite.model import LEAST

if TYPE_CHECKING:
    from torch import Tensor

    from fatbench.engine.rounds import Tensors
    from fatbench.engine.setup import Setup

log = logging.getLogger("fatbench")

GRADIENT_IMAGES = 1000  # test images whose loss gradients are checked for zeros: twice the cost of their accuracy


@dataclass(frozen=True)
class _Stage:
    """An evaluation of one round's model."""

    round: int
    evaluation: Evaluation
    name: str  # the stage's name
    digest: str | None  # of the model's file; None if the file was never on this machine
    source: transfer.TrainedModel  # the models that a transfer attack is computed on
    record: Mapping[str, Any]  # the record of the cell's training

    @property
    def diverged(self) -> int | None:
        """The round in which malicious clients ended the training of this model."""
        return self.record.get("diverged") if self.round == self.record["last"]["round"] else None


@dataclass
class _Loaded:
    """What the evaluations of a cell share: its Setup, and the models that were loaded last."""

    ready: Setup | None = None
    microbatch: int | None = None  # the limit that the Setup's network is bound to
    round: int = -1  # the round of `models`
    models: dict[int, Tensors] = field(default_factory=dict)  # client -> model; {-1: model} if all clients share one
    source: transfer.TrainedModel | None = None  # the source of `origins`
    origins: transfer.Origins | None = None
    # client -> what it keeps in place of the tensors of `model`
    own: Mapping[int, Tensors] = field(default_factory=dict)
    model: Tensors = field(default_factory=dict)
    for_unseen: Callable[[Mapping[int, Tensors]], Tensors] = lambda own: {}  # `own` -> those of one that never trains

    def setup(self, turn: Turn, machine: Machine) -> Setup:
        """Return the cell's Setup, whose network takes at most `machine.microbatch` images at once."""
        if self.ready is None:
            job = replace(turn.job, spec=weights.untrained(turn.job.spec))  # those of its own model follow
            self.ready, self.microbatch = ready_for(replace(turn, job=job), machine, None)[1], machine.microbatch
        if machine.microbatch and machine.microbatch != self.microbatch:  # the GPU ran out of memory
            from fatbench.engine import microbatch

            microbatch.bound(self.ready.problem.model, machine.microbatch)
            self.microbatch = machine.microbatch
        return self.ready

    def pairs(self, stage: _Stage, file: Path, digest: str | None, machine: Machine) -> list[transfer.ModelPair]:
        """Pair each model with the one that its attack is computed on, loading them where necessary.

        Raises the errors of `transfer.pairs`, and DamagedCheckpoint if `file` is damaged.
        """
        from fatbench.engine.accuracy import models_of

        assert self.ready is not None
        if self.round != stage.round:
            model, client_tensors, _ = checkpoints.load_model(
                file, machine.device, digest, file.parent.name, stage.round
            )
            self.models, self.round = models_of(model, client_tensors), stage.round
            self.model, self.own = model, client_tensors
        if stage.evaluation.on:
            return [*map(self._pair_of, own_images(self.ready, stage.evaluation))]
        origin = stage.evaluation.origin
        if origin is None:
            return [transfer.ModelPair(k, model) for k, model in self.models.items()]
        if self.origins is None or self.source != stage.source:
            self.source, self.origins = stage.source, transfer.read_origins(origin, stage.source, self.ready, machine)
        return transfer.pairs(origin, stage.source, self.models, self.origins)

    def _pair_of(self, client: int) -> transfer.ModelPair:
        """A client's model: the global one with the tensors that it keeps, or those of a client that never trains."""
        assert self.ready is not None
        if client >= len(self.ready.problem.shards) and self.own:
            return transfer.ModelPair(client, {**self.model, **self.for_unseen(self.own)})
        return transfer.ModelPair(client, {**self.model, **self.own.get(client, {})})


def own_images(ready: Setup, evaluation: Evaluation) -> dict[int, tuple[Tensor, Tensor, Tensor]]:
    """{client: (indices, images (n, C, H, W) uint8, labels (n,))} of the honest clients that have enough own images.

    Clients that never train are the last ones. SpecError: no client has enough.
    """
    source, _, least = evaluation.on.partition(" >= ")
    problem = ready.problem
    images, labels = (problem.images, problem.labels) if source == "held_out" else ready.test
    malicious = problem.malicious.numbers if problem.malicious is not None else ()
    enough = int(least or LEAST)
    found = {
        k: (indices := own[: evaluation.n], images[indices], labels[indices])
        for k, own in enumerate(ready.held if source == "held_out" else ready.written)
        if k not in malicious and len(own) >= enough
    }
    if not any(k < len(problem.shards) for k in found):
        raise SpecError(f"evaluate: {evaluation.label}: no client that trains has {enough} own images ({source})")
    return found


def attack_models(turn: Turn, machine: Machine, trained_again: bool, ready: Setup | None = None) -> CellStatus:
    """Run every evaluation of the job that is not done; if one fails, the others still run.

    An evaluation counts as done only if it attacked the model that is stored now: a model trained again can differ.
    Raises DamagedCheckpoint if a model that was trained here is lost or damaged. With `trained_again`, this is stored
    as a failure instead.
    """
    job, store = turn.job, turn.store
    rows = store.stages([job.cell])
    record = rows[(job.cell, "train")].record
    worst: CellStatus = "done"
    missing_origins: dict[str, str] = {}  # cell whose model is not trained yet -> its name in the suite
    changed_stages = versions.changed([job], store).get(job.cell, {})
    loaded = _Loaded(ready, machine.microbatch)
    if job.spec.get("unseen"):
        entry = calls.entry(calls.call("Algorithm", job.spec["algorithm"]).signature)
        loaded.for_unseen = getattr(entry, "for_unseen", None) or loaded.for_unseen
    rounds, trained_by = evaluation_rounds(job, record), plugins.files(job.spec)
    uses_other_plugin = {item.id: bool(plugins.files(job.spec, [item]) - trained_by) for item in job.evaluations}
    order = [(round, item) for round in rounds for item in job.evaluations]
    # attacks of plug-ins come last, so that a plug-in that changes torch cannot affect the others
    order.sort(key=lambda pair: uses_other_plugin[pair[1].id])
    for round, evaluation in order:
        digest = record.get("sha256", {}).get(model_file(round))  # None if the model was never on this machine
        stage = own_name = evaluation.stage(round, evaluation.computes_in(machine.precision))
        for name in evaluation.stages(round):  # a result in another precision counts too
            if (row := rows.get((job.cell, name))) is not None and row.status == "done":
                stage = name
                break
        row = rows.get((job.cell, stage))
        if stage in changed_stages and not machine.recovery.rerun_changed:
            continue
        origin = evaluation.origin
        origin_model = transfer.trained_model(origin.cell, store) if origin is not None and origin.cell else None
        if row is not None and row.status == "done" and stage not in changed_stages:
            if not transfer.of_former_model(row, rows[(job.cell, "train")]):
                continue
            store.reopen(job.cell, stage)
        if origin is not None and origin.cell and origin_model is None:
            missing_origins[origin.cell] = origin.name
            continue
        if stage != own_name:  # the stored result is outdated, and has another precision than this run
            if (run := claim(turn, stage, machine, 0, evaluation, fresh=True)) is not None:  # unless another holds it
                store.release(run)
            stage = own_name
        clients_digest = record.get("sha256", {}).get(clients_file(round))
        origin_source = origin_model or transfer.TrainedModel(job.cell, round, clients_file(round), clients_digest)
        attack = partial(_attack, _Stage(round, evaluation, stage, digest, origin_source, record), turn, loaded)
        status = carry_out(
            attack, turn, machine, stage, batch=evaluation.batch, evaluation=evaluation, fresh=stage in changed_stages,
            raised=(checkpoints.DamagedCheckpoint,) if digest is not None and not trained_again else (),
        )  # fmt: skip
        if status in ("interrupted", "blocked"):
            return status
        worst = max(worst, status, key=WORSE.index)
    if missing_origins and worst == "done":
        origin_names = ", ".join(f"{cell} ({name})" for cell, name in missing_origins.items())
        message = f"for the model of {origin_names}, which is not trained yet"
        turn.notify(Event(job.cell, "transfer", "waiting", message=message))
        return "waiting"
    return worst


def _attack(stage: _Stage, turn: Turn, loaded: _Loaded, run: int, machine: Machine) -> CellStatus:
    """Attack all images on every model of the round, continuing where the stage ended, until asked to stop."""
    import torch

    from fatbench.engine.accuracy import attack_in_chunks, most_frequent, packed, unpacked
    from fatbench.engine.outcomes import Seen, ball
    from fatbench.engine.plausible import CHANGED, changed_answers
    from fatbench.methods.packages import implementation, stage_observer

    evaluation, job, store = stage.evaluation, turn.job, turn.store
    file = turn.folder / model_file(stage.round)
    if stage.digest is None and not file.exists():
        raise MachineError(
            f"the model of round {stage.round} is not here ({file}): its results were imported, or it was removed. Copy"
            f" it from where it was trained; or, to train it here, fatbench delete {job.cell} and run the suite again;"
            " this deletes the imported numbers"
        )
    rows = store.stages([job.cell])
    digest = stage.digest
    if digest is None:  # imported numbers name the digest of their model, so that no other file passes for it
        of_round = (row.record for (_, attack), row in rows.items() if attack.endswith(f"@{stage.round}"))
        digest = next((record["model"] for record in of_round if "model" in record), None)
    ready = loaded.setup(turn, machine)
    pairs = loaded.pairs(stage, file, digest, machine)
    record: dict[str, Any] = {} if digest is None else {"model": digest}
    record |= {"origin": stage.source.digest} if evaluation.origin is not None and stage.source.digest else {}
    stage_row = rows[(job.cell, stage.name)]
    test_set = ready.test[0][: evaluation.n], ready.test[1][: evaluation.n]
    parts = [(pair, *test_set) for pair in pairs]
    if evaluation.on:
        of_clients = own_images(ready, evaluation)
        parts = [(pair, *of_clients[pair.client][1:]) for pair in pairs]
        record["clients"] = [[k, len(labels)] for k, (_, _, labels) in of_clients.items()]
        indices = [index.tolist() for index, *_ in of_clients.values()]
        record["images"] = cells.digest(indices)[:12]  # equal in two seeds: the same clients
    if stage_row.round and any(stage_row.record.get(key) != value for key, value in record.items()):
        store.restart(run)  # the stored outcomes belong to another model
    # of these the stage's name has the hash alone
    record["requested"] = {"n": evaluation.n, "batch": evaluation.batch}
    if evaluation.added:
        record["requested"]["added"] = True
    total = sum(len(labels) for *_, labels in parts)
    demand_same_inputs(turn, run, stage.name, ready.data)
    provenance: dict[str, Any] = {**ready.data, "attack": implementation(evaluation.attack["name"])}
    provenance |= {"microbatch": loaded.microbatch} if loaded.microbatch else {}
    store.describe_run(run, provenance, total=total)
    reader = Reader(store, run, job, stage.name, [evaluation])
    bits = [torch.from_numpy(unpacked(data, length)) for _, length, data in store.outcomes(job.cell, stage.name)]
    position = sum(len(b) for b in bits)
    turn.notify(Event(job.cell, stage.name, "start", position, total))
    attack = calls.build("Attack", evaluation.attack)
    attack_ball, observations = ball(attack), Seen(**stage_row.record.get("seen", {}) if position else {})
    passes_per_image = cost.attack_passes(evaluation.attack).total + 1

    def tell(name: str, standing: int) -> None:
        progress_text = f"{name} on {standing} of {min(evaluation.batch, max(len(labels) for *_, labels in parts))}"
        turn.notify(Event(job.cell, stage.name, "progress", position, total, message=progress_text))

    right = _natural_outcomes(stage, turn, loaded, digest, len(parts[-1][2]))
    look = partial(changed_answers, ready.problem, images=parts[-1][1], labels=parts[-1][2])
    changed = [] if right is None else [look(pairs[-1].judged, right=right)]
    begin = time.perf_counter()
    stage_observer.set(tell)
    end, chunk = 0, None
    for pair, images, labels in parts:  # all images on one model, then on the next
        offset, end = end, end + len(labels)
        if position >= end:
            continue
        chunks = attack_in_chunks(
            ready.problem, pair.judged, images, labels, attack, ("evaluate", evaluation.id, stage.round, *pair.key),
            batch=evaluation.batch, start=position - offset, origin=pair.origin,
        )  # fmt: skip
        for start, correct, _, doubtful in [(0, most_frequent(labels), None, Seen())] if stage.diverged else chunks:
            bits.append(correct)
            observations += doubtful
            position = offset + start + len(correct)
            chunk = (offset + start, len(correct), packed(correct))
            reader.tell()
            if position < total:  # the last chunk is written with the numbers that follow from all
                store.commit(run, round=position, outcomes=chunk, record={**record, "seen": asdict(observations)})
            so_far = sum(int(chunk_bits.sum()) for chunk_bits in bits) / position
            images_passed = passes_per_image * len(correct)
            turn.notify(Event(job.cell, stage.name, "progress", position, total, images_passed, accuracy=so_far))
            if position < total and turn.stop():
                store.release(run)
                turn.notify(Event(job.cell, stage.name, "interrupted", position, total))
                stage_observer.set(None)
                return "interrupted"
    stage_observer.set(None)
    correct_by_model = torch.cat(bits).split([len(labels) for *_, labels in parts])
    seconds = time.perf_counter() - begin
    if right is None and facts.role(evaluation.attack) == "natural" and not stage.diverged:
        right = correct_by_model[-1]
    changed += [] if right is None else [look(None, right=right)]
    trained = len(ready.problem.shards) if evaluation.on else None
    numbers = [*_numbers(stage, pairs, correct_by_model, trained), Number("seconds", seconds, stage.round)]
    numbers += [Number(PREFIX + code, value, stage.round) for code, value in _training_doubts(stage)]
    doubts = {**ready.doubts, **observations.doubts(attack_ball)}
    doubts |= {CHANGED: float(max(changed))} if any(changed) else {}
    numbers += [Number(doubt_names.name(words), amount, stage.round) for words, amount in doubts.items()]
    if evaluation.on:
        numbers += _own_numbers(stage, ready, parts)
    elif evaluation.origin is None:
        numbers += _side_numbers(stage, loaded, torch.stack(correct_by_model), job)
    store.finish(run, numbers, round=total, record=record, outcomes=chunk)
    log.info("%s: %s=%.6f on %d images", stage.name, numbers[0].metric, numbers[0].value, numbers[0].n)
    turn.notify(Event(job.cell, stage.name, "done", total, total))
    return "done"


def _natural_outcomes(stage: _Stage, turn: Turn, loaded: _Loaded, digest: str | None, last: int) -> Tensor | None:
    """Which of its images the last of the models classifies right, (n,) bool, as stored; None where nothing is."""
    import torch

    from fatbench.engine.accuracy import unpacked

    if stage.diverged or stage.evaluation.origin is not None:
        return None
    rows, cell = turn.store.stages([turn.job.cell]), turn.job.cell
    own = stage.evaluation.on
    alike = [one for one in turn.job.evaluations if one.origin is None and one.on == own]
    naturals = [
        one for one in alike if facts.role(one.attack) == "natural" and (not own or one.n == stage.evaluation.n)
    ]
    for name in (name for item in naturals for name in item.stages(stage.round) if name != stage.name):
        row = rows.get((cell, name))
        if row is not None and row.status == "done" and row.record.get("model") == digest:
            bits = [torch.from_numpy(unpacked(data, n)) for _, n, data in turn.store.outcomes(cell, name)]
            if own:
                return torch.cat(bits)[-last:] if bits else None
            return torch.cat(bits).reshape(len(loaded.models), -1)[-1] if bits else None
    return None


def _numbers(
    stage: _Stage, pairs: list[transfer.ModelPair], outcomes: Sequence[Tensor], trained: int | None = None
) -> list[Number]:
    """The accuracy over all models, and each client's where clients have their own models or images.

    outcomes: (n,) of each. On own images n counts those of all clients; `trained` and later ones never train, and
    their accuracy is UNSEEN.
    """
    import torch

    round, on = stage.round, bool(stage.evaluation.on)
    named: dict[str, list[tuple[int, Tensor]]] = {stage.evaluation.label: []}
    for pair, bits in zip(pairs, outcomes, strict=True):
        is_unseen = on and trained is not None and pair.client >= trained
        named.setdefault(UNSEEN if is_unseen else stage.evaluation.label, []).append((pair.client, bits))
    numbers = []
    for label, of_clients in named.items():
        accuracies = torch.stack([bits.double().mean() for _, bits in of_clients])
        n = sum(len(bits) for _, bits in of_clients) if on else len(of_clients[0][1])
        numbers.append(Number(label, float(accuracies.mean()), round, n=n))
        if len(of_clients) > 1 or of_clients[0][0] >= 0:
            pairs_of = zip(of_clients, accuracies, strict=True)
            numbers += [Number(label, float(value), round, len(bits), k) for (k, bits), value in pairs_of]
    return numbers


def _own_numbers(
    stage: _Stage, ready: Setup, parts: Sequence[tuple[transfer.ModelPair, Tensor, Tensor]]
) -> list[Number]:
    """The accuracy of a constant answer on the clients' own images and, if these are clean, doubts about the models."""
    from fatbench.engine.accuracy import most_frequent, zero_gradients
    from fatbench.engine.plausible import not_followed

    trained = [part for part in parts if part[0].client < len(ready.problem.shards)]
    constant = {pair.client: most_frequent(labels).double() for pair, _, labels in parts}
    n, round = sum(len(labels) for *_, labels in trained), stage.round
    right = sum(float(constant[pair.client].sum()) for pair, *_ in trained)
    numbers = [Number("chance", right / n, round, n=n)]
    numbers += [Number("chance", float(bits.mean()), round, len(bits), k) for k, bits in constant.items()]
    if facts.role(stage.evaluation.attack) == "natural" and not stage.diverged:
        first = [(pair.judged, images[:GRADIENT_IMAGES], labels[:GRADIENT_IMAGES]) for pair, images, labels in trained]
        checked = sum(len(labels) for *_, labels in first)
        immovable = sum(int(zero_gradients(ready.problem, *part) * len(part[2]) + 0.5) for part in first)
        numbers.append(Number("zero_gradients", immovable / checked, round, n=checked))
        share, used = max(not_followed(ready.problem, *part) for part in first)
        numbers += [Number("directional", share, round, n=used)] if used else []
    return numbers


def _training_doubts(stage: _Stage) -> Iterator[tuple[str, float]]:
    """Yield what happened in training that makes the model's numbers doubtful: (code, its round or a count)."""
    if stage.diverged:
        yield "diverged", float(stage.diverged)
    for code in ("ended", "uploads_refused"):
        if value := stage.record.get(code):
            yield code, float(value)
    for code, count in stage.record.get("said", {}).items():
        yield code + IN_ROUNDS, float(count)


def _side_numbers(stage: _Stage, loaded: _Loaded, outcomes: Tensor, job: Job) -> list[Number]:
    """Further numbers from the outcomes on the cell's own models; on clean images, also doubts about the models."""
    from fatbench.engine.accuracy import prior_accuracy, zero_gradients
    from fatbench.engine.plausible import doubts, not_followed

    ready, models, round, n = loaded.ready, loaded.models, stage.round, outcomes.shape[1]
    assert ready is not None
    images, labels = ready.test[0][:n], ready.test[1][:n]
    malicious = ready.problem.malicious.numbers if ready.problem.malicious is not None else ()
    # malicious clients have no accuracy of their own: an empty list of labels leaves them out
    client_labels = [
        ready.problem.labels[[] if k in malicious else shard] for k, shard in enumerate(ready.problem.shards)
    ]
    by_client = prior_accuracy(
        {k: outcomes[position] for position, k in enumerate(models)}, labels, client_labels, ready.classes
    )
    numbers = [Number("prior_accuracy", v, round, n, k) for k, v in by_client.items()]
    if facts.role(stage.evaluation.attack) == "natural":
        first_images, truth = images[:GRADIENT_IMAGES], labels[:GRADIENT_IMAGES]
        if not stage.diverged:
            zero_shares = [zero_gradients(ready.problem, model, first_images, truth) for model in models.values()]
            numbers.append(Number("zero_gradients", sum(zero_shares) / len(zero_shares), round, n=len(truth)))
            share, used = max(not_followed(ready.problem, model, images, labels) for model in models.values())
            numbers += [Number("directional", share, round, n=used)] if used else []
        numbers.append(Number("chance", float(labels.bincount().max()) / n, round, n=n))
    if not stage.diverged and ("evaluated" in job.spec or facts.role(stage.evaluation.attack) == "natural"):
        outputs = job.spec["evaluated"]["outputs"] if "evaluated" in job.spec else None
        words = doubts(ready.problem, next(iter(models.values())), images, labels, outputs)
        numbers += [Number(doubt_names.name(word), 1.0, round) for word in words]
    return numbers
