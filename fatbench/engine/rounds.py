"""The plain data that passes between the parts of the engine: a problem, its state, updates, rounds.

| here | papers | what |
|---|---|---|
| Problem.shards[k] | D_k | indices of client k's training examples |
| State.model | theta^t | parameters and buffers after round t |
| Update.model | theta_k | client k's parameters and buffers after local training |
| Update.n | N_k | training examples of client k |
| Mixing.weights | w_k | theta^{t+1} = broadcast * theta^t + sum_k w_k theta_k |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from fatbench.settings import LocalPath, Precision

if TYPE_CHECKING:
    from torch import Generator, Tensor, device, nn

    from fatbench.engine.graphs import Recordings
    from fatbench.suite.entry import Passes

Metrics = dict[str, "float | dict[int, float]"]  # name -> a number, or one per client
Tensors = dict[str, "Tensor"]
Memory = dict[str, Any]  # tensors by nested names, such as {"variate": {weight name: tensor}}


@dataclass(frozen=True)
class Problem:
    """What an algorithm works on: a model's architecture and the clients' data, all on one device."""

    model: nn.Module  # its weights are overwritten at will; the truth is in State.model
    images: Tensor  # (N, C, H, W) uint8, on the device
    labels: Tensor  # (N,) int64, on the device
    shards: list[Tensor]  # per client (N_k,) int64 indices into images, on the device
    classes: int  # C
    seed: int
    device: device
    precision: Precision = "fp32"
    path: LocalPath = "loop"
    size: int | None = None  # side in pixels that images are resized to before a model or an attack sees them
    augment: Callable[[Tensor, Generator], Tensor] | None = None  # what training does to a batch before the attack
    auxiliary: Tensor | None = None  # (A, C, H, W) uint8, unlabelled images of the server's own (FedAUX)
    malicious: Any = None  # `malicious.Malicious`: which clients deviate, and how
    availability: Any = None  # `cohort.Availability`: which clients are away
    recordings: Recordings | None = None  # where steps of the path graphs stay recorded from round to round
    held_out: tuple[Tensor, Tensor] | None = None  # (V, C, H, W) uint8 and labels (V,): images that no client has
    adversary: Any = None  # `malicious.AdversaryMemory`, which the engine keeps


@dataclass(frozen=True)
class State:
    """All that an algorithm needs to go on after a crash. `round` counts the rounds completed."""

    round: int
    model: Tensors  # state_dict of the global model
    server: Memory = field(default_factory=dict)  # e.g. {"aggregator": {"lambda": ...}, "variate": {...}}
    clients: dict[int, Memory] = field(default_factory=dict)  # e.g. SCAFFOLD's c_k; only clients that have any


@dataclass(frozen=True)
class Stats:
    """What a client reports of its local training, as Python numbers."""

    loss: float  # mean training loss per example over the last local epoch, each batch before its step
    loss_released: float  # sum over batches of mean loss * batch size, / number of batches, last epoch (SFAT release)
    accuracy: float  # on the training inputs (adversarial under AT), running over all local epochs of the round
    steps: int  # tau_k
    momentum_steps: float  # ||a_k||_1 of FedNova; equals `steps` without momentum
    batches: int  # per epoch
    # mean loss of theta^t on the client's data; only if the aggregator asks for it
    broadcast_loss: float | None = None


@dataclass(frozen=True)
class Update:
    """What one client has trained in a round, and which of it is uploaded: server and attackers see only that."""

    client: int
    n: int
    model: Tensors  # state_dict after local training
    stats: Stats
    extra: Memory = field(default_factory=dict)  # what the algorithm uploads besides, e.g. c_k+ - c_k
    refused: int = 0  # uploads of the round that the server left out: not finite, or filtered
    passes: Passes | None = None  # of an image that it trained on
    sent: frozenset[str] | None = None  # names of the tensors that it uploads (None: all); the server sees theta^t else
    batch: Tensor | None = None  # what measures alone see: the positions of a gradient's images in problem.images

    @property
    def upload(self) -> Tensors:
        """The tensors that it uploads."""
        return {name: self.model[name] for name in self.model if self.sent is None or name in self.sent}


@dataclass(frozen=True)
class Mixing:
    """How the server combines the updates: weights (m,), in the order of the updates.

    theta^{t+1} = broadcast * theta^t + sum_k weights[k] * theta_k. A proper aggregator has non-negative weights,
    broadcast 0 and sum 1; only released and control variants deviate, and say so.
    `norm` holds the weights for normalisation layers (None: the same). `norm_match` says which tensors those are:
    "modules" by the type of the layer, "substring" by "bn" in the name, as the SFAT release does. `model` is the next
    state_dict itself, from an aggregator that weights cannot describe (a median); its weights are only shown.
    """

    weights: list[float]
    broadcast: float = 0.0
    norm: list[float] | None = None
    norm_match: Literal["modules", "substring"] = "modules"
    model: Tensors | None = None
    selected: tuple[int, ...] = ()  # positions in the list of updates that the aggregator singled out
    memory: Memory = field(default_factory=dict)  # becomes Context.memory of the next round
    metrics: Metrics = field(default_factory=dict)  # further numbers of the aggregator, e.g. AdFL's scores
    artifacts: Tensors = field(default_factory=dict)  # tensors kept for the report, e.g. AdFL's images


@dataclass(frozen=True)
class Cost:
    """What a round cost, counted, not estimated."""

    gradient_steps: float = 0
    forward: float = 0  # image passes
    backward: float = 0
    bytes_up: int = 0
    bytes_down: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Round:
    """A finished round."""

    index: int  # from 0
    broadcast: Tensors
    updates: list[Update]
    mixing: Mixing | None
    state: State  # after the round: go on from here
    cost: Cost
    # Without one global model: client k's model is {**state.model, **own[k]}, and accuracies are means over clients.
    own: dict[int, Tensors] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)  # further numbers of the algorithm
    artifacts: Tensors = field(default_factory=dict)  # as in Mixing
    last: bool = False  # the algorithm ends with it, before its last round


@dataclass(frozen=True)
class Number:
    """One measurement of a cell, as the database keeps it."""

    metric: str  # "pgd20", "train_loss", "weight", ...
    value: float
    round: int  # rounds completed when it was measured (1-based count; 0 = the initial model)
    n: int = 0  # examples behind it; 0 = not a mean over examples
    client: int = -1  # -1 = not about one client


@dataclass(frozen=True)
class Context:
    """What an aggregator may know besides the updates."""

    round: int
    rounds: int
    problem: Problem  # the architecture, the number of clients, the shape of the images; never the data itself
    broadcast: Tensors  # theta^t
    memory: Memory  # what the aggregator left in Mixing.memory last round
    lr: float
