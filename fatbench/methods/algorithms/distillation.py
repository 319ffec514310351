"""What the distillation algorithms share: the loss, matching by example, the exchange of edge and server.

| papers | here | what |
|---|---|---|
| W_e^k, W_c^k | edge_of(state, k) | client k's extractor and classifier; never averaged between clients |
| W_s, W_t | tensors "server.*" of state.model | the server's network |
| H_i, y_i | transferred.read(rows), .labels[rows] | features and label of example transferred.ids[row] |
| z_i | transferred.logits[rows] | the edge's logits for it |
| z_s,i, z_t,i | knowledge | the server's logits for it, kept at the client with the ids of its examples |

The rows of every tensor that is sent are examples, identified by their index into Problem.images. The released FedGKT
identifies them by the number of the batch, which under a shuffling loader is a different image each time (differences:
fedgkt-release). Features and logits come from images that are not augmented.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fatbench.engine.local import Batch, Client, LocalTraining, copy_state, load, pixels, train, trainable
from fatbench.engine.malicious import poisoned_rows
from fatbench.engine.optimizers import packed, unpacked
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Memory, Metrics, Problem, State, Stats, Tensors, Update
from fatbench.suite.calls import call
from fatbench.suite.facts import Facts
from fatbench.suite.types import Attack

EDGE = ("extractor.", "classifier.")
Keep = Literal["float32", "bfloat16", "recompute"]
Filter = Literal["none", "median"]


def divergence(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(softmax(teacher / T) || softmax(student / T)), the mean over the batch: logits (B, C) to a scalar.

    Its gradient by a student's logits is T (q - p) / B, with p, q the softened distributions of teacher and student.
    Hinton et al. 2015; the release adds 1e-7 to the teacher's probabilities, which logarithms do not need.
    """
    log_p, log_q = (teacher / temperature).log_softmax(1), (student / temperature).log_softmax(1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum(1).mean()


def match(ids: Tensor, values: Tensor, example_ids: Tensor) -> Tensor:
    """The rows of `values` (n, ...) for the examples `example_ids` (b,), where row i belongs to ids[i].

    Raises ValueError for an example that is not among `ids`.
    """
    order = ids.argsort()
    # an id above all others is clamped to the last row, and found unequal below
    positions = order[torch.searchsorted(ids[order], example_ids).clamp_(max=len(ids) - 1)]
    if not torch.equal(ids[positions], example_ids):
        unknown = int((ids[positions] != example_ids).sum())
        raise ValueError(f"{unknown} of {len(example_ids)} examples have no knowledge: the client's shard has changed")
    return values[positions]


def check_model(algorithm: str, model: nn.Module) -> None:
    """Raise ValueError for a model without an edge and a server."""
    absent_parts = [part_name for part_name in ("extractor", "classifier", "server") if not hasattr(model, part_name)]
    if absent_parts:
        raise ValueError(
            f"{algorithm} needs a model of an edge and a server (edge_vit, edge_resnet, edge_resnet8): "
            f"{type(model).__name__} has no {absent_parts[0]}"
        )


# --- the edge ----------------------------------------------------------------------------------------------------


class Edge(nn.Module):
    """A device's network, classifier(extractor(x)), which keeps the logits of its last forward pass."""

    logits: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.extractor = model.get_submodule("extractor")
        self.classifier = model.get_submodule("classifier")

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, classes)."""
        self.logits = self.classifier(self.extractor(x))
        return self.logits


def edge_of(state: State, k: int) -> Tensors:
    """Client k's extractor and classifier; before its first round, those of the initial model."""
    client_state = state.clients.get(k)
    return (
        client_state["edge"]
        if client_state
        else {name: value for name, value in state.model.items() if name.startswith(EDGE)}
    )


def own_starts(problem: Problem, state: State) -> State:
    """The state before the first round with each edge drawn anew, from the stream (seed, "edge", k)."""
    edges = {}
    for k in range(len(problem.shards)):
        model = load(problem, state.model)
        with forked(problem.seed, "edge", k, device=problem.device):
            for module in Edge(model).modules():
                if callable(reset := getattr(module, "reset_parameters", None)):
                    reset()
        edges[k] = {"edge": copy_state(model, EDGE)}
    return replace(state, clients=edges)


def train_edge(
    problem: Problem, state: State, k: int, round: int, local: LocalTraining, *, temperature: float, alpha: float
) -> tuple[Memory, Stats]:
    """Train client k's edge; ({"edge", "optimizer"} for the client to keep, its statistics).

    The loss is the objective's plus alpha times the divergence from the server's logits for the same examples, once
    there are any. The divergence is taken at the images of the objective's last forward pass: the clean ones under
    standard training, TRADES and MART; the adversarial ones under adversarial training, where it is the loss of
    adversarially robust distillation (Goldblum et al. 2020). It needs no further pass. Raises ValueError for a proximal
    term, because nothing is broadcast.
    """
    if local.proximal is not None:
        raise ValueError("local: proximal: no edge receives broadcast weights to pull towards")
    model = load(problem, {**state.model, **edge_of(state, k)})
    edge = Edge(model)
    names = [name for name in trainable(model) if name.startswith(EDGE)]
    weights: list[Tensor] = [model.get_parameter(name) for name in names]
    client_state = state.clients.get(k, {})
    moments = unpacked(client_state.get("optimizer", {}), names)
    knowledge = client_state.get("knowledge")
    taught = None if knowledge is None else match(knowledge["ids"], knowledge["logits"], problem.shards[k])

    # the edge's last pass is the objective's, so that no further one is needed
    def distillation(batch: Batch) -> Tensor:
        assert taught is not None
        return alpha * divergence(edge.logits.float(), taught[batch.rows], temperature)

    loss_of = None if taught is None else distillation
    moments, client_stats = train(Client(problem, {}, k, round), edge, weights, local, moments=moments, loss_of=loss_of)
    return {"edge": copy_state(model, EDGE), "optimizer": packed(moments, names)}, client_stats


# --- between edge and server -------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Row numbers (b,) of what was sent: on the host, to find their clients, and on the device."""

    host: Tensor
    device: Tensor


def split(problem: Problem, rows: Tensor, batch: int) -> Iterator[Rows]:
    """Row numbers (N,) in batches, copied to the device at once, so that no step waits for them."""
    return map(Rows, rows.split(batch), rows.to(problem.device).split(batch))


@dataclass(frozen=True)
class Transferred:
    """What the edges have sent in one round, client after client; row i of every tensor is example ids[i]."""

    ids: Tensor  # (N,)
    owned: dict[int, slice]  # {client: its rows}
    logits: Tensor  # (N, classes) of the edges, float32
    labels: Tensor  # (N,)
    features: Tensor | None  # (N, c, h, w); None if they are recomputed when they are read
    feature_bytes: int  # of one example, as sent
    read: Callable[[Rows], Tensor]  # features (b, c, h, w) float32
    rows_sent: int  # with those of clients that the server leaves out
    judged: int = 0  # rows that the server passed once to choose clients
    poisoned: int | None = None  # rows that malicious clients have changed; None: they change no rows


def transfer(problem: Problem, state: State, clients: Mapping[int, Tensors], batch: int, keep: Keep) -> Transferred:
    """Features and logits of every client's examples from its new edge, in eval mode and float32, without augmentation.

    For a ResNet-18 stem on 32 x 32 images, features take 4 * 64 * 32 * 32 bytes = 256 KiB an example, 13 GB for
    CIFAR-10. `keep: bfloat16` halves that; `recompute` keeps none and runs the edge's extractor again whenever the
    server reads a batch (the bytes sent are counted as float32).
    """
    ids = torch.cat([problem.shards[k] for k in clients])
    owned = _consecutive({k: len(problem.shards[k]) for k in clients})
    features: Tensor | None = None
    logits = torch.empty(len(ids), problem.classes, device=problem.device)
    size = 0
    for k, edge in clients.items():
        model = load(problem, {**state.model, **edge}).eval()
        for rows in torch.arange(owned[k].start, owned[k].stop, device=problem.device).split(batch):
            with torch.no_grad():
                h = model.get_submodule("extractor")(pixels(problem, problem.images[ids[rows]]))
                logits[rows] = model.get_submodule("classifier")(h)
            if keep != "recompute" and features is None:
                features = torch.empty(len(ids), *h.shape[1:], dtype=getattr(torch, keep), device=problem.device)
            if features is not None:
                features[rows] = h.to(features.dtype)
            size = h[0].numel() * (2 if keep == "bfloat16" else 4)
    feature_reader = (
        _recompute_features(problem, clients, ids, owned) if features is None else _stored_features(features)
    )
    sent = Transferred(ids, owned, logits, problem.labels[ids], features, size, feature_reader, len(ids))
    is_poisoned = problem.malicious is not None and problem.malicious.acting("features") and features is not None
    return _poisoned(problem, state, sent, clients) if is_poisoned else sent


def _poisoned(problem: Problem, state: State, sent: Transferred, clients: Mapping[int, Tensors]) -> Transferred:
    """What is sent once malicious clients have changed their rows, without clients whose rows are not finite."""
    assert sent.features is not None
    parts = (sent.features, sent.logits, sent.labels)
    honest = {k: (parts[0][rows], parts[1][rows], parts[2][rows]) for k, rows in sent.owned.items()}

    def offers(k: int) -> dict[str, Callable[[], Any]]:
        def edge(images: Tensor) -> tuple[Tensor, Tensor]:
            model = load(problem, {**state.model, **clients[k]}).eval()
            with torch.no_grad():
                h = model.get_submodule("extractor")(pixels(problem, images))
                return h, model.get_submodule("classifier")(h)

        return {"images": lambda: problem.images[problem.shards[k]], "edge": lambda: edge}

    rows = poisoned_rows(problem, state.round, honest, offers)
    changed = [
        torch.stack(
            [(a != b).flatten(1).any(1) if a.dim() > 1 else a != b for a, b in zip(one, honest[k], strict=True)]
        )
        for k, one in rows.items()
    ]
    features, logits, labels = (torch.cat([one[i] for one in rows.values()]) for i in range(3))
    return replace(
        sent,
        ids=torch.cat([sent.ids[sent.owned[k]] for k in rows]),
        owned=_consecutive({k: len(labels) for k, (_, _, labels) in rows.items()}),
        logits=logits,
        labels=labels,
        features=features,
        read=_stored_features(features),
        poisoned=sum(int(one.any(0).sum()) for one in changed),
    )


def _consecutive(counts: Mapping[int, int]) -> dict[int, slice]:
    """{client: its rows} where each client's rows follow those of the one before."""
    ends = itertools.accumulate(counts.values())
    return {k: slice(end - count, end) for (k, count), end in zip(counts.items(), ends, strict=True)}


def without_outliers(problem: Problem, model: Tensors, sent: Transferred, batch: int, rule: Filter) -> Transferred:
    """What is left without clients on whose rows the server's loss is too high.

    `median`: the mean cross-entropy of a client's rows is above the median over clients by more than three median
    absolute deviations, for the server as it begins the round. Ours.
    """
    if rule == "none":
        return sent
    load(problem, model)
    losses = F.cross_entropy(clean_pass(problem, sent, batch), sent.labels, reduction="none")
    means = torch.stack([losses[rows].mean() for rows in sent.owned.values()])
    above = means - means.median()
    too_high = (above > 3 * above.abs().median()).tolist()
    kept = [k for k, is_far in zip(sent.owned, too_high, strict=True) if not is_far]
    judged = replace(sent, judged=len(sent.ids))
    if len(kept) == len(sent.owned):
        return judged
    rows = torch.cat([torch.arange(len(sent.ids))[sent.owned[k]] for k in kept])
    on_device = rows.to(problem.device)
    features = None if sent.features is None else sent.features[on_device]

    def read(some: Rows) -> Tensor:
        return sent.read(Rows(rows[some.host], on_device[some.device]))

    return replace(
        judged,
        ids=sent.ids[rows.to(sent.ids.device)],
        owned=_consecutive({k: sent.owned[k].stop - sent.owned[k].start for k in kept}),
        logits=sent.logits[on_device],
        labels=sent.labels[rows.to(sent.labels.device)],
        features=features,
        read=read if features is None else _stored_features(features),
    )


def taught_clients(
    trained: Mapping[int, tuple[Memory, Stats]], state: State, new: Mapping[int, Tensors]
) -> dict[int, Memory]:
    """What clients keep: their edges and the server's new logits; a client that was left out keeps its old ones."""
    old = {k: memory["knowledge"] for k, memory in state.clients.items() if "knowledge" in memory}
    known = {**old, **new}
    return {k: {**edge, **({"knowledge": known[k]} if k in known else {})} for k, (edge, _) in trained.items()}


def honest_features(cell: Facts, *, features: str, server_attack: Attack | None) -> str | None:
    """Refuse poisoned rows where features are computed anew."""
    malicious = cell.spec.get("malicious")
    attacks = call("Malicious", malicious).nested.values() if malicious else ()
    if not any("features" in attack.signature.asks for attack in attacks):
        return None
    if features == "recompute":
        return "features: recompute cannot hold poisoned rows; set features: float32"
    return "server_attack computes features anew, without what is poisoned: leave one out" if server_attack else None


def _stored_features(features: Tensor) -> Callable[[Rows], Tensor]:
    return lambda rows: features[rows.device].float()


def _by_client(rows: Rows, owned: Mapping[int, slice], read_client: Callable[[int, Tensor], Tensor]) -> Tensor:
    """read_client(k, positions in `rows`) of each client, (m, ...) for its m rows, in the order of `rows` again."""
    positions, client_values = [], []
    for k, client_rows in owned.items():
        row_positions = ((rows.host >= client_rows.start) & (rows.host < client_rows.stop)).nonzero().flatten()
        if len(row_positions):
            client_values.append(read_client(k, row_positions))
            positions.append(row_positions)
    values = torch.cat(client_values)
    # argsort of a permutation is its inverse
    return values[torch.cat(positions).argsort().to(values.device)]


def _extractors(clients: Mapping[int, Tensors]) -> dict[int, Tensors]:
    """{client: state_dict of its extractor}."""
    return {
        k: {n.removeprefix("extractor."): v for n, v in edge.items() if n.startswith("extractor.")}
        for k, edge in clients.items()
    }


def _recompute_features(
    problem: Problem, clients: Mapping[int, Tensors], ids: Tensor, owned: Mapping[int, slice]
) -> Callable[[Rows], Tensor]:
    extractor, extractor_by_client = problem.model.get_submodule("extractor"), _extractors(clients)

    def features_of_rows(rows: Rows) -> Tensor:
        def read_client(k: int, row_positions: Tensor) -> Tensor:
            x = pixels(problem, problem.images[ids[rows.host[row_positions].to(ids.device)]])
            with torch.no_grad():
                features: Tensor = functional_call(extractor.eval(), extractor_by_client[k], (x,))
            return features

        return _by_client(rows, owned, read_client)

    return features_of_rows


class Inputs:
    """The server's training inputs: the features that were sent or, with an `attack`, those of adversarial images.

    The attack is computed on the networks as they are at that moment, client by client: the client's extractor and the
    server, both in eval mode; the server is left in train mode. Edges and server can do this together: an edge sends
    the features of every step, and the server returns their gradient. `images` counts the attack's forward passes, `up`
    and `down` the bytes of these features and gradients, in float32.
    """

    def __init__(
        self,
        problem: Problem,
        clients: Mapping[int, Tensors],
        transferred: Transferred,
        attack: Attack | None,
        round: int,
    ) -> None:
        self.problem, self.sent, self.attack = problem, transferred, attack
        self.extractors = _extractors(clients)
        self.noise = generator(problem.seed, "server_attack", round, device=problem.device)
        self.images, self.up, self.down = 0, 0, 0

    def __call__(self, rows: Rows) -> Tensor:
        """Features (b, c, h, w) of rows (b,)."""
        attack, transferred = self.attack, self.sent
        if attack is None:
            return transferred.read(rows)
        model = self.problem.model.eval()
        extractor, server = model.get_submodule("extractor"), model.get_submodule("server")

        def read_client(k: int, row_positions: Tensor) -> Tensor:
            extractor.load_state_dict(self.extractors[k])
            client_rows = rows.device[row_positions.to(rows.device.device)]
            x = pixels(self.problem, self.problem.images[transferred.ids[client_rows]])
            x_adv = attack(model, x, transferred.labels[client_rows], self.noise)
            with torch.no_grad():
                features: Tensor = extractor(x_adv)
            return features

        hook = server.register_forward_hook(self._count)  # an attack's own number of passes is not known before
        try:
            features = _by_client(rows, transferred.owned, read_client)
        finally:
            hook.remove()
        server.train()
        # the features of the finished images; those of the attack's passes are counted by the hook
        self.up += 4 * features.numel()
        return features

    def _count(self, _server: nn.Module, features: tuple[Tensor], _logits: Tensor) -> None:
        self.images += len(features[0])
        self.up += 4 * features[0].numel()
        self.down += 4 * features[0].numel()


def server_batches(
    problem: Problem, round: int, owned: Mapping[int, slice], epochs: int, batch: int, shuffle: bool
) -> Iterator[tuple[int, Rows]]:
    """(epoch, rows) of the server's batches: shuffled over all examples, or one client after the other."""
    order = generator(problem.seed, "server_order", round)
    example_count = max(client_rows.stop for client_rows in owned.values())
    for epoch in range(epochs):
        for group in [slice(0, example_count)] if shuffle else owned.values():
            permutation = torch.randperm(group.stop - group.start, generator=order) + group.start
            for rows in split(problem, permutation, batch):
                yield epoch, rows


def clean_pass(problem: Problem, transferred: Transferred, batch: int) -> Tensor:
    """The server's logits (N, classes) for every example, in eval mode and float32, by problem.model's weights."""
    server = problem.model.get_submodule("server").eval()
    with torch.no_grad():
        return torch.cat(
            [server(transferred.read(rows)) for rows in split(problem, torch.arange(len(transferred.ids)), batch)]
        )


def knowledge(transferred: Transferred, k: int, logits: Tensor) -> Tensors:
    """What client k receives and keeps: the server's "logits" (N_k, classes) and the "ids" (N_k,) of its examples."""
    client_rows = transferred.owned[k]
    return {"ids": transferred.ids[client_rows].clone(), "logits": logits[client_rows].clone()}


def uploads(transferred: Transferred, **answers: Tensor) -> dict[int, Tensors]:
    """{client: what it uploads}: its features if they are kept, its rows of `answers` (N, ...), its labels."""
    features = {} if transferred.features is None else {"features": transferred.features}
    uploaded = {**features, **answers, "labels": transferred.labels}
    return {
        k: {name: rows[client_rows] for name, rows in uploaded.items()} for k, client_rows in transferred.owned.items()
    }


def server_work(
    losses: Sequence[Tensor], steps: int, transferred: Transferred, epochs: int, clean: bool, attack_passes: int
) -> Metrics:
    """The metrics of the server's work in a round; `losses` are sums over the batches of its last epoch.

    clean: one more forward pass over all examples; attack_passes: forward and backward passes of an attack.
    """
    examples, poisoned = len(transferred.ids), transferred.poisoned
    return {
        "server_loss": float(torch.stack(list(losses)).double().sum()) / examples,
        "server_steps": float(steps),
        "server_forward": float(examples * (epochs + clean) + transferred.judged + attack_passes),
        "server_backward": float(examples * epochs + attack_passes),
        **({} if poisoned is None else {"poisoned": float(poisoned)}),
    }


def updates_of(
    problem: Problem, trained: Mapping[int, tuple[Memory, Stats]], extra: Mapping[int, Tensors]
) -> list[Update]:
    """What the clients of a round have sent; those whose rows were left out have sent nothing that is kept."""
    refused = len(trained) - len(extra)
    return [
        Update(k, len(problem.shards[k]), {}, stats, extra[k], refused)
        for k, (_, stats) in trained.items()
        if k in extra
    ]


def wire(
    transferred: Transferred, extra: Mapping[int, Tensors], logits_down: Tensor, inputs: Inputs
) -> tuple[int, int]:
    """(bytes up, bytes down) of a round: the tensors of `extra`, features that were not kept, the logits down, and the
    exchange of the server's attack.
    """
    bytes_up = sum(t.numel() * t.element_size() for client_extra in extra.values() for t in client_extra.values())
    if transferred.features is None:
        bytes_up += transferred.feature_bytes * len(transferred.ids)
    bytes_up = bytes_up // len(transferred.ids) * transferred.rows_sent  # every row is as long
    return bytes_up + inputs.up, logits_down.numel() * logits_down.element_size() + inputs.down
