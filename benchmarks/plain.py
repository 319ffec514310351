"""What people run instead, written after the scripts that are published: the other side of every ratio.

`train` is a federated round as SFAT's release has it: one client after another, a DataLoader of single images, weight
gradients computed and thrown away inside PGD, and a look at every image's prediction from Python in every step (its
`kappa` counts the steps that an image withstands). Batches, noise and dropout come from the streams of
`fatbench.engine.local`, so that both sides compute the same thing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import functional as images

from fatbench.engine.local import LocalTraining
from fatbench.engine.randomness import forked, generator
from fatbench.engine.rounds import Problem, Tensors

Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Shard(Dataset[tuple[Tensor, int]]):
    """One client's images, read one by one as torchvision's data sets are."""

    def __init__(self, problem: Problem, indices: Tensor):
        chosen = problem.images[indices].cpu().numpy()
        self.images = numpy.ascontiguousarray(chosen.transpose(0, 2, 3, 1))
        self.labels = problem.labels[indices].tolist()
        self.size = problem.size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = Image.fromarray(self.images[index].squeeze())
        if self.size is not None:
            image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
        return images.to_tensor(image), self.labels[index]


def pgd(noise: torch.Generator, *, eps: float, step: float, steps: int) -> Attack:
    """PGD of SFAT's script: gradients of all weights, and the prediction of each image asked for in each step.

    After ZFancy/SFAT, attack_generator.py, MIT licence, (c) 2023 Jianing Zhu.
    """

    def attack(model: nn.Module, data: Tensor, target: Tensor) -> Tensor:
        model.eval()
        kappa = torch.zeros(len(data))
        start = torch.empty_like(data).uniform_(-eps, eps, generator=noise)
        x_adv = torch.clamp(data + start, 0, 1).detach()
        for _ in range(steps):
            x_adv.requires_grad_()
            output = model(x_adv)
            predicted = output.max(1)[1]
            for p in range(len(x_adv)):
                if predicted[p] == target[p]:
                    kappa[p] += 1
            model.zero_grad()
            F.cross_entropy(output, target).backward()
            assert x_adv.grad is not None
            x_adv = x_adv.detach() + step * x_adv.grad.sign()
            x_adv = torch.min(torch.max(x_adv, data - eps), data + eps)
            x_adv = torch.clamp(x_adv, 0, 1).detach()
        model.train()
        return x_adv

    return attack


def torchattacks_pgd(model: nn.Module, *, eps: float, step: float, steps: int) -> Attack:
    """torchattacks.PGD on every image of the batch."""
    import torchattacks

    attack = torchattacks.PGD(model, eps=eps, alpha=step, steps=steps)
    return lambda model, data, target: attack(data, target)


def train(
    problem: Problem,
    broadcast: Tensors,
    cohort: Sequence[int],
    local: LocalTraining,
    attack_of: Callable[[torch.Generator], Attack],
    *,
    ratio: float = 1.0,
    round: int = 0,
) -> list[Tensors]:
    """The weights of every client of the cohort after local adversarial training; `ratio` of a batch is attacked."""
    results = []
    for k in cohort:
        problem.model.load_state_dict(broadcast)
        optimizer = torch.optim.SGD(
            problem.model.parameters(), lr=local.lr, momentum=local.momentum, weight_decay=local.weight_decay
        )
        attack = attack_of(generator(problem.seed, "attack", round, k, device=problem.device))
        order = generator(problem.seed, "order", round, k)
        with forked(problem.seed, "dropout", round, k, device=problem.device):
            for _ in range(local.epochs):
                _epoch(problem, k, local.batch, optimizer, attack, ratio, order)
        results.append({name: value.detach().clone() for name, value in problem.model.state_dict().items()})
    return results


def _epoch(
    problem: Problem,
    k: int,
    batch: int,
    optimizer: torch.optim.Optimizer,
    attack: Attack,
    ratio: float,
    order: torch.Generator,
) -> None:
    shard = problem.shards[k]
    shuffled = torch.randperm(len(shard), generator=order).tolist()
    # A loader draws its workers' seed: not from the stream of dropout.
    loader: Any = DataLoader(
        Shard(problem, shard), batch_size=batch, sampler=shuffled, generator=torch.Generator().manual_seed(0)
    )
    for images_, labels in loader:
        data, target = images_.to(problem.device), labels.to(problem.device)
        attacked = int(ratio * len(data))
        data[:attacked] = attack(problem.model, data[:attacked], target[:attacked])
        problem.model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(problem.model(data), target)
        loss.backward()
        optimizer.step()
        loss.item()  # the running loss that scripts print


def lean(model: nn.Module, data: Tensor, labels: Tensor, batch: int, *, eps: float, step: float, steps: int) -> None:
    """The least that an eager loop can do for adversarial training: no client, no data set, no streams, no statistics.

    `data` (N, C, H, W) float. SGD with momentum and weight decay, all tensors at once. What the program does beyond
    this is its own overhead.
    """
    weights: list[Tensor] = [weight for weight in model.parameters() if weight.requires_grad]
    velocity = [torch.zeros_like(weight) for weight in weights]
    for x, y in zip(data.split(batch), labels.split(batch), strict=True):
        model.eval()
        x_adv = (x + torch.empty_like(x).uniform_(-eps, eps)).clamp_(0, 1)
        low, high = x - eps, x + eps
        for _ in range(steps):
            loss = F.cross_entropy(model(x_adv.requires_grad_()), y)
            (gradient,) = torch.autograd.grad(loss, x_adv)
            x_adv = x_adv.detach().add_(gradient.sign(), alpha=step).clamp_(low, high).clamp_(0, 1)
        model.train()
        gradients = torch.autograd.grad(F.cross_entropy(model(x_adv), y), weights)
        with torch.no_grad():
            change = torch._foreach_add(gradients, weights, alpha=1e-4)
            torch._foreach_mul_(velocity, 0.9)
            torch._foreach_add_(velocity, change)
            torch._foreach_add_(weights, velocity, alpha=-0.01)


def margin_pgd(model: nn.Module, *, eps: float, step: float, steps: int) -> Callable[[Tensor, Tensor], Tensor]:
    """CW-inf as a class of torchattacks: its PGD on the margin loss. The CW of the package is another attack, in L2."""
    import torchattacks

    class CW(torchattacks.PGD):
        def forward(self, images: Tensor, labels: Tensor) -> Tensor:
            adv = (images + torch.empty_like(images).uniform_(-self.eps, self.eps)).clamp(0, 1).detach()
            onehot = F.one_hot(labels, 10)
            for _ in range(self.steps):
                adv.requires_grad = True
                logits = self.get_logits(adv)
                real, other = (onehot * logits).sum(1), ((1 - onehot) * logits - onehot * 10000).max(1)[0]
                cost = -torch.clamp(real - other + 50, min=0).sum()
                gradient = torch.autograd.grad(cost, adv)[0]
                adv = adv.detach() + self.alpha * gradient.sign()
                adv = (images + (adv - images).clamp(-self.eps, self.eps)).clamp(0, 1).detach()
            return adv

    attack: Callable[[Tensor, Tensor], Tensor] = CW(model, eps=eps, alpha=step, steps=steps)
    return attack
