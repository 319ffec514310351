"""What a client minimises: training objectives, and proximal terms that keep it near the broadcast model.

    loss, correct = OBJECTIVES["trades"](model, x, y, generator, attack=attack, beta=6)

`model`, `x`, `y`, `generator` are as in `fatbench.methods.evasion`; `attack` is an attack with its settings bound.
`loss` is a scalar, the mean over the batch. `correct` (B,) bool says which of the training inputs (the adversarial
ones, if any) the model classified correctly before the step. The attack sees the model in eval mode (no dropout,
running batch-norm statistics, which it does not update), the loss in train mode, and the model is left in train mode
(as in SFAT's update.py; Aldahdooh et al. 2022 do not say).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fatbench.engine.gradients import predict
from fatbench.engine.randomness import uniform
from fatbench.methods.evasion import pgd
from fatbench.models.dual_norm import on_attacked_images
from fatbench.suite.entry import Entry, Passes, ProximalEntry, passes
from fatbench.suite.types import Attack, NonNegative, Positive, Probability, Radius, rounded_down


def standard(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Standard training: CE(f(x), y).

    x (B, C, H, W) in [0, 1] and y (B,) to the loss, a scalar, and correct (B,) bool, as every objective here.
    """
    model.train()
    return _cross_entropy(model, x, y)


def at(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack) -> tuple[Tensor, Tensor]:
    """Adversarial training: CE(f(x_adv), y) with x_adv from the attack.

    Madry et al. 2018 (arXiv 1706.06083), equation 2.1; Zhu et al. 2023: pgd with 10 steps.
    """
    return _cross_entropy(model, adversarial_images(model, x, y, generator, attack), y)


def attack_and_one(*, attack: Attack) -> Passes:
    return passes(attack) + 1


def trades(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, beta: NonNegative = 6.0
) -> tuple[Tensor, Tensor]:
    """TRADES: CE(f(x), y) + beta mean KL(p(x) || p(x_adv)), the gradient through both distributions.

    Zhang et al. 2019 (arXiv 1901.08573), Algorithm 1; its inner attack is pgd_kl. SFAT's paper does not give beta, its
    code has 6.
    """
    adversarial, clean = _adversarial_and_clean(model, x, y, generator, attack)
    divergence = _kl(clean.log_softmax(1), adversarial.log_softmax(1))
    return F.cross_entropy(clean, y) + beta * divergence.mean(), _correct(adversarial, y)


def attack_and_two(*, attack: Attack) -> Passes:
    return passes(attack) + 2


def mart(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, beta: NonNegative = 6.0
) -> tuple[Tensor, Tensor]:
    """MART: boosted CE on x_adv + beta mean KL(p(x) || p(x_adv)) (1 - p_y(x)).

    Wang et al. 2020 (ICLR, "Improving adversarial robustness requires revisiting misclassified examples"), Algorithm 1.
    Boosted CE = CE(f(x_adv), y) - log(1 - max_{j != y} p_j(x_adv)). Its inner attack is pgd with start "gaussian".
    The constants 1.0001, 1.0000001 and 1e-12 that keep the logarithms and the weight positive are its code's.
    """
    adversarial, clean = _adversarial_and_clean(model, x, y, generator, attack)
    p_adversarial, log_p_clean = adversarial.softmax(1), clean.log_softmax(1)
    label = y.unsqueeze(1)
    likely_wrong = p_adversarial.scatter(1, label, -1.0).argmax(1)  # -1: the label never wins
    boosted = F.cross_entropy(adversarial, y) + F.nll_loss((1.0001 - p_adversarial + 1e-12).log(), likely_wrong)
    divergence = _kl(log_p_clean, (p_adversarial + 1e-12).log())
    weight = 1.0000001 - log_p_clean.exp().gather(1, label).squeeze(1)
    return boosted + beta * (divergence * weight).mean(), _correct(adversarial, y)


def mixed_at(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, ratio: Probability = 0.5
) -> tuple[Tensor, Tensor]:
    """Mixed-ratio adversarial training: floor(ratio B) random images of the batch are replaced by adversarial ones.

    Aldahdooh et al. 2022 (FAT with transformers): ratio 0.5, B 24, pgd with 7 steps. One forward pass over the mixed
    batch, so that batch normalisation sees both kinds together. The counted passes are exact if ratio B is an integer.
    """
    count = rounded_down(ratio * len(x))
    if count:
        attacked_index = torch.randperm(len(x), generator=generator, device=x.device)[:count]
        x_adv = adversarial_images(model, x[attacked_index], y[attacked_index], generator, attack)
        x = x.index_put((attacked_index,), x_adv)
    model.train()
    return _cross_entropy(model, x, y)


def part_attacked(*, attack: Attack, ratio: float) -> Passes:
    return ratio * passes(attack) + 1


def mixfat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    attack: Attack,
    mix: Literal["append", "weighted", "sum"],
    ratio: Probability = 0.5,
) -> tuple[Tensor, Tensor]:
    """Clean and adversarial images in one loss, in the ways that public code calls MixFAT or FAT, besides `mixed_at`.

    append: the batch and floor(ratio B) adversarial versions of its first images in one forward pass, mean over all.
    weighted: (1 - ratio) CE(f(x), y) + ratio CE(f(x_adv), y), two forward passes. sum: CE(f(x), y) + CE(f(x_adv), y),
    without a ratio. `mixed_at` is the fourth way, "replace". Zizzo et al. 2020 (arXiv 2012.01791) was first, but does
    not state its ratio or its way. The counted passes of append are exact if ratio B is an integer.
    """
    if mix != "append":
        clean_weight, weight = (1.0, 1.0) if mix == "sum" else (1.0 - ratio, ratio)
        adversarial, clean = _adversarial_and_clean(model, x, y, generator, attack)
        loss = clean_weight * F.cross_entropy(clean, y) + weight * F.cross_entropy(adversarial, y)
        return loss, _correct(adversarial, y)
    count = rounded_down(ratio * len(x))
    x_adv = adversarial_images(model, x[:count], y[:count], generator, attack) if count else x[:0]
    model.train()
    loss, correct = _cross_entropy(model, torch.cat([x, x_adv]), torch.cat([y, y[:count]]))
    return loss, torch.cat([correct[len(x) :], correct[count : len(x)]])


def appended_or_both(*, attack: Attack, ratio: float, mix: str) -> Passes:
    return ratio * (passes(attack) + 1) + 1 if mix == "append" else passes(attack) + 2


def sum_without_ratio(*, mix: str, ratio: float) -> str | None:
    return "ratio: 'mix: sum' has no ratio" if mix == "sum" and ratio != 0.5 else None


def dual_at(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, ratio: Probability = 0.5
) -> tuple[Tensor, Tensor]:
    """AT of a network with two statistics: (1 - ratio) CE(f_c(x), y) + ratio CE(f_n(x_adv), y); x_adv attacks f_n.

    f_c and f_n normalise by the statistics of clean and of attacked images; see `fatbench.models.dual_norm`. Hong et
    al. 2023 (FedRBN), ratio 0.5 in their code. On another network it is `mixfat` with mix: weighted.
    """
    model.eval()
    with on_attacked_images(model):
        x_adv = attack(model, x, y, generator)
    model.train()
    with on_attacked_images(model):
        adversarial = predict(model, x_adv)
    clean = predict(model, x)
    loss = (1 - ratio) * F.cross_entropy(clean, y) + ratio * F.cross_entropy(adversarial, y)
    return loss, _correct(adversarial, y)


def n_fgsm_at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    *,
    eps: Radius,
    k: NonNegative = 2.0,
    step: Radius | None = None,
) -> tuple[Tensor, Tensor]:
    """N-FGSM: adversarial training by one gradient step of size `step` (eps, unless given) from noise of k eps.

    The step is not projected on the ball, only on the box, so an image may move by (k + 1) eps. de Jorge et al. 2022
    (arXiv 2202.01181). Their code attacks in train mode; here in eval mode, as every objective. FGSM-RS needs no
    function: it is `at` with {name: pgd, step: 10/255, steps: 1} at eps 8/255.
    """

    def attack(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        noisy = (x + uniform(x, -k * eps, k * eps, generator)).clamp(0, 1)
        return pgd(model, noisy, y, generator, eps=1.0, step=eps if step is None else step, steps=1, start="none")

    return at(model, x, y, generator, attack=attack)


def awp_at(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, *, attack: Attack, gamma: NonNegative = 0.005
) -> tuple[Tensor, Tensor]:
    """AWP: AT at perturbed weights, CE(f_{w+v}(x_adv), y) with v_l = gamma |w_l| g_l / |g_l|, g the gradient at w.

    Each tensor of two or more dimensions is perturbed on its own. x_adv is crafted at w; the pass that gives g does not
    update the running statistics. gamma 0 is `at`. Wu et al. 2020 (arXiv 2004.05884) use 0.01; the federated code
    NUDTPingLuo/FedLAT uses 0.005 from round 10 on, for every tensor; here from the first round.
    """
    x_adv = adversarial_images(model, x, y, generator, attack)
    # w.dim() > 1: biases and normalisation stay / FedLAT: every tensor
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad and w.dim() > 1}
    # copies: the pass that gives g must not update the running statistics
    buffer_copies = {name: buffer.clone() for name, buffer in model.named_buffers()}
    loss = F.cross_entropy(torch.func.functional_call(model, buffer_copies, (x_adv,)).float(), y)
    gradients = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
    perturbed = {
        name: w + gamma * w.detach().norm() * g / g.norm().clamp(min=1e-20)
        for (name, w), g in zip(weights.items(), gradients, strict=True)
    }
    logits = torch.func.functional_call(model, perturbed, (x_adv,)).float()
    return F.cross_entropy(logits, y), _correct(logits, y)


# --- by the client's class counts ---------------------------------------------------------------------------------


def calfat(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    class_counts: Tensor,
    *,
    attack: Attack,
    missing: Positive = 1.0,
) -> tuple[Tensor, Tensor]:
    """CalFAT: AT on calibrated logits, CE(f(x_adv) + log n, y), n_c the client's examples of class c.

    The inner attack sees the calibrated logits too; CalFAT's is pgd_kl. Prediction and evaluation use f alone. A class
    that the client lacks counts as `missing` examples, because log 0 is undefined; the authors use 1. Chen et al. 2022
    (arXiv 2205.14926); the formula is that of its code without the code's temperature: `calfat_released`.
    """
    shift = class_counts.where(class_counts > 0, missing).log()
    with _shifted_logits(model, shift):
        return at(model, x, y, generator, attack=attack)


def calfat_released(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, class_counts: Tensor, *, attack: Attack
) -> tuple[Tensor, Tensor]:
    """CalFAT as its authors' code computes it: logits are scaled by 10 in the loss, and not in the inner attack.

    Loss: CE(10 f(x_adv) + log(n + 1e-7), y). Attack: on f + 0.1 log(n + 1e-7). A class that the client lacks counts as
    1 example. The rest of that code (plain mean of models, learning rate, split) is left to the suite.

    Source: cc233/CalFAT utils.py:98-102, 216-245.
    """
    # released: the attack sees f + 0.1 log n, the loss ten times that
    offset = 0.1 * (class_counts.clamp(min=1) + 1e-7).log()
    with _shifted_logits(model, offset):
        x_adv = adversarial_images(model, x, y, generator, attack)
        logits = 10 * predict(model, x_adv)
    return F.cross_entropy(logits, y), _correct(logits, y)


def margin_at(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    generator: torch.Generator,
    class_counts: Tensor,
    *,
    attack: Attack,
    tau: NonNegative = 1.0,
) -> tuple[Tensor, Tensor]:
    """AT with a margin by class frequency: CE(f(x_adv) - tau n^(-1/4), y), also inside the attack.

    n_c is the client's examples of class c, 1e-8 where it has none: that class then leaves the softmax. tau 0 is `at`.
    The margin is FedLC's as public code has it, for clean training. This is not FatCC, nor any calibration of FAT that
    a paper names.

    Source: Zhang et al. 2022 (FedLC), KarhouTam/FL-bench src/client/fedlc.py:14-34 (the margin); ours (with AT).
    """
    with _shifted_logits(model, -tau * class_counts.clamp(min=1e-8) ** -0.25):
        return at(model, x, y, generator, attack=attack)


@contextlib.contextmanager
def _shifted_logits(model: nn.Module, offset: Tensor) -> Iterator[None]:
    """A context in which `offset` (1, classes) is added to the model's logits (B, classes)."""
    # a hook: the attack calls the model itself, and must see the offset, too
    handle = model.register_forward_hook(lambda module, inputs, logits: logits + offset)
    try:
        yield
    finally:
        handle.remove()


def adversarial_images(model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, attack: Attack) -> Tensor:
    model.eval()
    x_adv: Tensor = attack(model, x, y, generator)
    model.train()
    return x_adv


def _adversarial_and_clean(
    model: nn.Module, x: Tensor, y: Tensor, generator: torch.Generator, attack: Attack
) -> tuple[Tensor, Tensor]:
    # Two forward passes, adversarial first: each normalises by its own batch and updates the running statistics.
    x_adv = adversarial_images(model, x, y, generator, attack)
    return predict(model, x_adv), predict(model, x)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # (B,), from logarithms: if a probability underflows to 0, kl_div's gradient is log 0, which becomes NaN.
    return (log_p.exp() * (log_p - log_q)).sum(1)


def _cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    logits = predict(model, x)
    return F.cross_entropy(logits, y), _correct(logits, y)


def _correct(logits: Tensor, y: Tensor) -> Tensor:
    return logits.argmax(1) == y


# --- proximal terms -----------------------------------------------------------------------------------------------
# (weights, broadcast, round, *, mu) -> the gradient to add to the objective's, one tensor per trainable tensor.
# mu has a different meaning in each of the two, so a table never mixes them.


def squared(weights: list[Tensor], broadcast: list[Tensor], round: int, *, mu: NonNegative) -> list[Tensor]:
    """FedProx: the gradient of (mu / 2) ||w - w_t||^2 over all weights, mu (w - w_t).

    Li et al. 2020 (arXiv 1812.06127), equation 2. Aldahdooh et al. 2022 (mu 0.1); differences: fedprox-forms.
    """
    return list(torch._foreach_mul(torch._foreach_sub(weights, broadcast), mu))


def pull(*, mu: float) -> float:
    return mu


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
    "standard": Entry(standard, passes=Passes(1, 1)),
    "at": Entry(at, passes=attack_and_one, cites=("madry2018", "zhu2023")),
    "trades": Entry(trades, passes=attack_and_two, cites=("zhang2019",)),
    "mart": Entry(mart, passes=attack_and_two, cites=("wang2020mart",)),
    "mixed_at": Entry(mixed_at, passes=part_attacked, cites=("aldahdooh2022",)),
    "mixfat": Entry(
        mixfat, passes=appended_or_both, refuse=(sum_without_ratio,), example={"mix": "weighted"}, cites=("zizzo2020",)
    ),
    "dual_at": Entry(dual_at, passes=attack_and_two),
    "n_fgsm_at": Entry(n_fgsm_at, passes=Passes(2, 2), cites=("dejorge2022",)),
    "awp_at": Entry(awp_at, passes=attack_and_two, cites=("wu2020",)),
    "calfat": Entry(calfat, passes=attack_and_one, cites=("chen2022",)),
    "calfat_released": Entry(calfat_released, passes=attack_and_one),
    "margin_at": Entry(margin_at, passes=attack_and_one, cites=("zhang2022fedlc",)),
}

PROXIMALS: dict[str, Callable[..., list[Tensor]]] = {
    "squared": ProximalEntry(squared, rate=pull, cites=("aldahdooh2022", "li2020fedprox")),
    "norm_per_tensor": ProximalEntry(norm_per_tensor, cites=("zhu2023",)),
}
