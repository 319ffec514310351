"""What a client minimises: training objectives, and the proximal terms that hold it near the broadcast model.

    loss, correct = OBJECTIVES["trades"](model, x, y, generator, attack=attack, beta=6)

`model`, `x`, `y`, `generator` are as in `fatbench.methods.attacks`; `attack` is an attack with its settings bound.
`loss` is a scalar to call backward() on, the mean over the batch; `correct` (B,) bool says which of the images that the
model was trained on (the adversarial ones, where there are any) it classified right, before the step. The attack sees
the model in eval mode (dropout off, running batch-norm statistics, which it leaves alone), the loss in train mode, and
the model is left in train mode (SFAT's update.py; Aldahdooh et al. 2022 do not say).

Where the batch holds K clients (`fatbench.engine.fast.draws`), `loss` is (K,), each client's mean: the formula of a
loss is a function of logits that `per_client` calls. An objective without that is never stacked, and trains client by
client.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.engine.fast.draws import clients_of, per_client, subset
from fatbench.engine.gradients import predict
from fatbench.suite.types import Attack, NonNegative, Probability


def standard(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard training: CE(f(x), y).

    x (B, C, H, W) in [0, 1] and y (B,) to the loss, a scalar, and correct (B,) bool, as every objective here.

    Forward: 1
    Backward: 1
    """
    model.train()
    return _cross_entropy(model, x, y, generator)


def at(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack) -> tuple[Tensor, Tensor]:
    """Adversarial training: CE(f(x_adv), y) with x_adv from the attack.

    Madry et al. 2018 (arXiv 1706.06083), equation 2.1; Zhu et al. 2023: pgd with 10 steps.

    Forward: attack + 1
    Backward: attack + 1
    """
    return _cross_entropy(model, _adversarial(model, x, y, generator, attack), y, generator)


def trades(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, beta: NonNegative = 6.0
) -> tuple[Tensor, Tensor]:
    """TRADES: CE(f(x), y) + beta mean KL(p(x) || p(x_adv)), the gradient through both distributions.

    Zhang et al. 2019 (arXiv 1901.08573), Algorithm 1; its inner attack is pgd_kl. SFAT's paper does not give beta, its
    code has 6.

    Forward: attack + 2
    Backward: attack + 2
    """

    def loss(adversarial: Tensor, clean: Tensor, y: Tensor) -> Tensor:
        divergence = _kl(clean.log_softmax(1), adversarial.log_softmax(1))
        return F.cross_entropy(clean, y) + beta * divergence.mean()

    adversarial, clean = _both(model, x, y, generator, attack)
    return per_client(loss, generator, adversarial, clean, y), _correct(adversarial, y)


def mart(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, beta: NonNegative = 6.0
) -> tuple[Tensor, Tensor]:
    """MART: boosted CE on x_adv + beta mean KL(p(x) || p(x_adv)) (1 - p_y(x)).

    Wang et al. 2020 (ICLR, "Improving adversarial robustness requires revisiting misclassified examples"), Algorithm 1.
    Boosted CE = CE(f(x_adv), y) - log(1 - max_{j != y} p_j(x_adv)). Its inner attack is pgd with start "gaussian".
    The constants 1.0001, 1.0000001 and 1e-12 that keep the logarithms and the weight positive are its code's.

    Forward: attack + 2
    Backward: attack + 2
    """

    def loss(adversarial: Tensor, clean: Tensor, y: Tensor) -> Tensor:
        p_adversarial, log_p_clean = adversarial.softmax(1), clean.log_softmax(1)
        label = y.unsqueeze(1)
        likely_wrong = p_adversarial.scatter(1, label, -1.0).argmax(1)
        boosted = F.cross_entropy(adversarial, y) + F.nll_loss((1.0001 - p_adversarial + 1e-12).log(), likely_wrong)
        divergence = _kl(log_p_clean, (p_adversarial + 1e-12).log())
        weight = 1.0000001 - log_p_clean.exp().gather(1, label).squeeze(1)
        return boosted + beta * (divergence * weight).mean()

    adversarial, clean = _both(model, x, y, generator, attack)
    return per_client(loss, generator, adversarial, clean, y), _correct(adversarial, y)


def mixed_at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    attack: Attack,
    ratio: Probability = 0.5,
) -> tuple[Tensor, Tensor]:
    """Mixed-ratio adversarial training: floor(ratio B) random images of the batch are replaced by adversarial ones.

    Aldahdooh et al. 2022 (FAT with transformers): ratio 0.5, B 24, pgd with 7 steps. One forward over the
    mixed batch, so that batch norm, where a model has it, sees both kinds together. The passes are exact where ratio B
    is whole.

    Forward: ratio * attack + 1
    Backward: ratio * attack + 1
    """
    each = len(x) // len(clients_of(generator))
    count = math.floor(ratio * each + 1e-9)  # 0.29 * 100 is 28.999999999999996 in floats, and means 29
    if count:
        chosen = subset(x, count, generator)
        x_adv = _adversarial(model, x[chosen], y[chosen], generator, attack)
        x = x.index_put((chosen,), x_adv)
    model.train()
    return _cross_entropy(model, x, y, generator)


def _adversarial(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, attack: Attack) -> Tensor:
    model.eval()
    x_adv: Tensor = attack(model, x, y, generator)
    model.train()
    return x_adv


def _both(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, attack: Attack) -> tuple[Tensor, Tensor]:
    # Two forwards, adversarial first: each normalises by its own batch and updates the running statistics.
    x_adv = _adversarial(model, x, y, generator, attack)
    return predict(model, x_adv), predict(model, x)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # (B,) from logarithms: where a probability underflows to 0, kl_div's gradient by it is log 0, and NaN further on.
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _cross_entropy(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    logits = predict(model, x)
    return per_client(F.cross_entropy, generator, logits, y), _correct(logits, y)


def _correct(logits: Tensor, y: Tensor) -> Tensor:
    return logits.argmax(1) == y


# --- proximal terms -----------------------------------------------------------------------------------------------
# (weights, broadcast, round, *, mu): the gradient to add to that of the objective, one tensor per trainable tensor.
# The same mu means different things in the two, so a table never mixes them.


def squared(weights: list[Tensor], broadcast: list[Tensor], round: int, *, mu: NonNegative) -> list[Tensor]:
    """FedProx: the gradient of (mu / 2) ||w - w_t||^2 over all weights, mu (w - w_t).

    Li et al. 2020 (arXiv 1812.06127), equation 2. Aldahdooh et al. 2022 (mu 0.1); differences: fedprox-forms.

    Rate: mu
    """
    return list(torch._foreach_mul(torch._foreach_sub(weights, broadcast), mu))


def norm_per_tensor(
    weights: list[Tensor], broadcast: list[Tensor], round: int, *, mu: NonNegative, skip_first: bool = True
) -> list[Tensor]:
    """FedProx as SFAT released it: (mu / 2) sum_l ||w_l - w_l,t||, one norm per tensor, not squared.

    Gradient (mu / 2) (w_l - w_l,t) / ||w_l - w_l,t||, so a pull of constant size; zero at equality. Zhu et al. 2023,
    update.py and appendix E.8 (mu 0.01). `skip_first`: nothing is added in round 0, as in the file.
    """
    differences = torch._foreach_sub(weights, broadcast)
    if skip_first and round == 0:
        return list(torch._foreach_mul(differences, 0.0))
    # Below 1e-12 the unit vector shrinks to zero instead of jumping: both are subgradients of the norm at zero.
    norms = torch._foreach_clamp_min(torch._foreach_norm(differences), 1e-12)
    return list(torch._foreach_mul(torch._foreach_div(differences, list(norms)), mu / 2))


OBJECTIVES: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "standard": standard,
    "at": at,
    "trades": trades,
    "mart": mart,
    "mixed_at": mixed_at,
}

PROXIMALS: dict[str, Callable[..., list[Tensor]]] = {
    "squared": squared,
    "norm_per_tensor": norm_per_tensor,
}
