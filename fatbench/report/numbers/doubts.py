"""Every reason to doubt a number: decided once from what is stored, as codes and values, and put into words here.

    why = doubts(numbers, attacks, data, outcomes)      (cell, stage) -> its doubts
    in_words(why["0a1b2c3d4e5f", "pgd20-8d1c@30"])      what a table, a page, `show`, `compare` and a frame say

A stronger attack must leave no more images right than a weaker one does, up to sampling error. Two accuracies p (weaker
attack) and q (stronger) on the same n images differ by (b - c)/n, with c images right only under the weaker attack and
b only under the stronger. Where the outcomes of each image are stored, b and c are known and (b - c) has standard
deviation sqrt(b + c) if the attacks were equally strong (McNemar). Otherwise outcomes are taken as independent,
sqrt((p(1-p) + q(1-q))/n), which is an upper bound for outcomes that go together, as these do. A violation is a
difference of more than 3 standard deviations.

And has the network learned anything? Its natural accuracy must be above that of the most frequent class, or nothing
follows from the others. A robust accuracy that is not above it is one that a constant classifier has.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fatbench.data.catalogue import CATALOGUE
from fatbench.errors import FatbenchError
from fatbench.report.numbers.statistics import binomial_tail
from fatbench.store.doubt_names import IN_ROUNDS, PREFIX
from fatbench.store.stage_names import parsed
from fatbench.suite import facts
from fatbench.suite.asked import attack_of
from fatbench.suite.signatures import names
from fatbench.suite.types import number, seeds_text

SIGMAS = 3.0
ZERO_GRADIENTS = 0.01  # fraction of images without any loss gradient above which attacks are not to be trusted
DIRECTIONAL = 0.5  # fraction of images whose loss does not change as its gradient says, above which they are not, too
# true gaps to AutoAttack beyond honest networks' largest: of one attack, of all together; 0 of 463 stored ones fire
MASKED_ALONE, MASKED_TOGETHER, MASKED_LEVEL, MASKED_IMAGES = 0.06, 0.04, 0.005, 50
OWN = " of each client's own images"  # whose most frequent class it is
LEVEL = 0.01  # of the test whether an accuracy is above a constant classifier's
STRENGTH = {"fgsm": 0, "pgd": 1, "cw": 1, "autoattack": 2}  # of attacks in one ball, from the weakest

_TEST = f"(one-sided binomial test, p >= {LEVEL:g})"
_LEVELS = "images lie in {value:.0f} of 256 grey levels: a radius is a larger part of their contrast"
WORDS = {  # code -> what is printed; {value}, {against} and {metric} are the doubt's
    "diverged": "training diverged in round {value:.0f}, so accuracy is that of the most frequent class",
    "ended": "training ended in round {value:.0f}, as its algorithm says",
    "uploads_refused": "{value:.0f} uploads were not finite and were left out",
    "not_finite": "not a number",
    "outputs_are_not_finite": "outputs of {value:.0f} images are not finite: they count as wrong",
    "clean_images_are_answered_otherwise": "{value:.0f} clean images are answered otherwise before or after the attack,"
    " or where it asks for a gradient, than they were for the natural accuracy",
    "attacked_images_are_not_finite": "{value:.0f} attacked images are not finite",
    "an_attack_leaves_its_radius": "an attack moves an image by {value:.4g}, beyond its radius",
    "an_attack_leaves_the_pixel_range": "an attack leaves the pixel range by {value:.4g}",
    "test_images_are_training_images": "{value:.0f} test images are training images",
    "test_images_are_in_two_classes": "{value:.0f} test images are also in another class: no network has them right",
    "training_images_are_in_two_classes": "{value:.0f} training images are also in another class",
    "test_images_have_few_grey_levels": f"nearly all pixels of the test {_LEVELS}",
    "training_images_have_few_grey_levels": f"nearly all pixels of the training {_LEVELS}",
    "training_and_test_images_differ_in_brightness": "training and test images differ in brightness or contrast by a"
    " factor of {value:.2g}",
    "files_are_not_read": "files in the folders of its classes that are not read: {value:.0f}",
    "training_images_are_dealt_to_a_client_twice": "{value:.0f} training images are dealt to a client twice",
    "training_images_are_dealt_to_several_clients": "{value:.0f} training images are dealt to several clients",
    "clients_have_no_images": "{value:.0f} clients have no training images and take no part",
    "chance": f"natural accuracy is at chance{{against}} {_TEST}",
    "majority": f"not above the most frequent class{{against}} {_TEST}",
    "order": "{metric} exceeds {against} by more than 3 standard errors",
    "gradient": f"the loss has no gradient on more than {100 * ZERO_GRADIENTS:g}% of the images:"
    " gradient attacks overstate robustness",
    "directional": "gradients do not follow the loss, on {value:.0%} of the images tried: attacks overstate robustness",
    "masked": "masked: {value:.1f} points more than AutoAttack on the same images;"
    " gradient attacks overstate robustness",
    "other_attack": "may be of another attack or other images:"
    " the stored {against} does not give the hash in its stage's name",
    "changed": "computed with {against}",
    "no_settings": "the settings of its attack are not recorded",
    "no_commit": "the commit of its code is not recorded",
    "unverified": "imported from a file without digests: nobody can tell whether it was edited",
    "no_outcomes": "no outcome of each image is stored",
    "impossible": "no accuracy that {value:.0f} images can give",
    "not_cut": "of all its images: they cannot be cut to the common ones",
    "tf32": "attacked in tf32",
    "bf16": "attacked in bf16",
}
PRECISION = frozenset({"tf32", "bf16"})
MEASURED_WELL = frozenset({"majority", "no_commit", *PRECISION})  # the number is right, and says little
NOT_ABOVE = frozenset({"diverged", "chance", "majority"})  # a constant classifier
NOT_LEARNED = frozenset({"diverged", "chance"})  # of a network whose other accuracies mean nothing
RULE = (
    f"no attack may leave more images right than a weaker one does, up to {SIGMAS:g} standard errors of the difference"
    " on the same images"
)


class Doubt(NamedTuple):
    """One reason to doubt one accuracy."""

    code: str  # of WORDS; any other is its own words: "no_update_was_trusted"
    value: float = math.nan  # a round, a count, a fraction; NaN: there is none
    against: str = ""  # the other attack's label
    metric: str = ""  # the label of what is doubted

    @property
    def words(self) -> str:
        """The doubt as it is printed."""
        if self.code in WORDS:
            return WORDS[self.code].format(value=self.value, against=self.against, metric=self.metric)
        code = self.code.removesuffix(IN_ROUNDS)
        return code.replace("_", " ") + (f" in {self.value:.0f} rounds" if code != self.code else "")

    @property
    def short(self) -> str:
        """The doubt as one word of a data frame: "diverged=4", "order=0.03:fgsm", "bf16"."""
        value = "" if math.isnan(self.value) else f"={self.value:.4g}"
        return self.code + value + (f":{self.against}" if self.against else "")


Outcomes = Callable[[str, str], tuple[int, int]]  # (cell, stage) -> (bits, how many); 0: not stored
Doubts = dict[tuple[str, str], tuple[Doubt, ...]]  # (cell, stage) -> its doubts, those that a run stored first


def in_words(doubts: Iterable[Doubt]) -> list[str]:
    """Doubts as they are printed, each once."""
    return list(dict.fromkeys(doubt.words for doubt in doubts))


def cells_of(doubts_by_stage: Doubts) -> dict[str, int]:
    """Words of a doubt -> number of cells that it is about, the largest first."""
    cells: dict[str, set[str]] = {}
    for (cell, _), reasons in doubts_by_stage.items():
        for words in in_words(reasons):
            cells.setdefault(words, set()).add(cell)
    return {words: len(cells[words]) for words in sorted(cells, key=lambda words: (-len(cells[words]), words))}


def with_seeds(
    numbers: Iterable[tuple[int, Iterable[Doubt]]], measured_seeds: Collection[int], seed_count: int
) -> tuple[str, ...]:
    """The doubts about numbers (seed, doubts) in words, each once, with its seeds where these are not all measured."""
    doubted: dict[Doubt, list[int]] = {}
    for seed, of_seed in numbers:
        for doubt in of_seed:
            doubted.setdefault(doubt, []).append(seed)
    if not doubted:
        return ()
    texts: dict[str, list[int]] = {}
    for doubt, seeds in doubted.items():
        texts.setdefault(doubt.words, []).extend(seeds)
    return tuple(
        text
        if len(seeds) == seed_count or (measured_seeds and {*measured_seeds} <= {*seeds})
        else f"{text} (seed{'s' * (len(seeds) > 1)} {seeds_text(seeds)})"
        for text, seeds in texts.items()
    )


def doubts(
    numbers: Iterable[tuple[Any, ...]],
    attacks: Mapping[str, Mapping[str, Any]],
    data: Mapping[str, Mapping[str, Any]],
    outcomes: Outcomes | None = None,
) -> Doubts:
    """Every reason to doubt the evaluations among these numbers; a stage without one is not in it.

    numbers: as `stored.Number`; those of training and of single clients are passed over. attacks: evaluation
    ("pgd20-0a1b2c3d") -> its attack with all settings. data: cell -> its data set.
    """
    # (cell, round, on whose images) -> stage -> metric
    models: dict[tuple[str, int, str], dict[str, dict[str, tuple[float, int]]]] = {}
    for cell, stage, round, client, metric, value, n, *_ in numbers:
        if stage != "train" and client < 0:
            on = str(attacks.get(parsed(stage).evaluation, {}).get("on", ""))
            models.setdefault((cell, round, on), {}).setdefault(stage, {})[metric] = value, n
    evaluations_of = functools.cache(functools.partial(_evaluations, attacks))  # ten thousand cells share a few
    doubts_by_stage: Doubts = {}
    for (cell, *_), stages in models.items():
        outcomes_of_cell = None if outcomes is None else functools.partial(outcomes, cell)
        accuracies = [
            item._replace(value=stages[item.stage][item.label][0], n=stages[item.stage][item.label][1])
            for item in evaluations_of(tuple(stages))
            if item.label in stages[item.stage]
        ]
        for stage, reasons in _doubts_of_model(stages, accuracies, data.get(cell, {}), outcomes_of_cell).items():
            if reasons:
                doubts_by_stage[cell, stage] = tuple(reasons)
    return doubts_by_stage


class _Accuracy(NamedTuple):
    """One evaluation of one model; without value and n what it shares with those of other models."""

    stage: str
    label: str
    precision: str
    is_attacked: bool
    is_transferred: bool  # computed on another model
    on: str  # the clients' own images; empty: the test images
    is_natural: bool
    weaker: frozenset[str]  # the stages whose attacks must leave at least as many images right
    by_gradient: Mapping[str, str]  # of AutoAttack: the stages of gradient attacks in its ball -> their names
    value: float = math.nan
    n: int = 0


def _evaluations(settings: Mapping[str, Mapping[str, Any]], stages: tuple[str, ...]) -> list[_Accuracy]:
    """What the evaluations of these stages share, whatever the model."""
    attacks = {stage: settings.get(parsed(stage).evaluation, {}) for stage in stages}
    found = []
    for stage, attack in attacks.items():
        by_gradient: dict[str, str] = {}  # gradient attacks on the same model in the ball of AutoAttack
        if attack.get("name") == "autoattack" and "origin" not in attack:
            beside = {other: one for other, one in attacks.items() if one.get("name") in ("fgsm", "pgd", "cw")}
            by_gradient = {
                other: one["name"] for other, one in beside.items()
                if "origin" not in one and one.get("norm", "Linf") == attack.get("norm", "Linf")
                and number(one.get("eps", 0)) == number(attack.get("eps", 0))
            }  # fmt: skip
        found.append(_Accuracy(
            stage, parsed(stage).metric, parsed(stage).precision, _role(attack) == "attack", "origin" in attack,
            str(attack.get("on", "")), attack.get("name") == "natural",
            frozenset(other for other in stages if weaker(attacks[other], attack)), by_gradient,
        ))  # fmt: skip
    return found


def _doubts_of_model(
    stages: Mapping[str, Mapping[str, tuple[float, int]]],
    accuracies: Sequence[_Accuracy],
    data: Mapping[str, Any],
    outcomes: Callable[[str], tuple[int, int]] | None,
) -> dict[str, list[Doubt]]:
    """The doubts about each evaluation of one model."""
    doubts_by_stage: dict[str, list[Doubt]] = {item.stage: [] for item in accuracies}
    for stage, reasons in doubts_by_stage.items():  # those that a run stored with the evaluation
        for metric, (value, _) in stages[stage].items():
            if value and metric.startswith(PREFIX):
                code = metric.removeprefix(PREFIX)
                reasons.append(Doubt(code, value if code in WORDS or code.endswith(IN_ROUNDS) else math.nan))
    diverged = any(doubt.code == "diverged" for reasons in doubts_by_stage.values() for doubt in reasons)
    naturals = [
        item
        for item in accuracies
        if (item.is_natural if item.on else item.label == "natural")
        if item.n and math.isfinite(item.value)
    ]
    natural = max(naturals, key=lambda accuracy: accuracy.n, default=None)
    fraction, dead, astray, guesses = None, 0.0, 0.0, False
    if natural is not None:
        natural_metrics = stages[natural.stage]
        dead, astray = (natural_metrics.get(name, (0.0, 0))[0] for name in ("zero_gradients", "directional"))
        stored_chance = natural_metrics["chance"][0] if "chance" in natural_metrics else None
        fraction = None if diverged else chance(data, stored_chance, natural.n)
        guesses = fraction is not None and not above_chance(_pooled(natural, outcomes), natural.n, fraction)
    least_accuracy = min((item.value for item in accuracies if math.isfinite(item.value)), default=0.0)
    for item in accuracies:
        reasons, is_attacked = doubts_by_stage[item.stage], item.is_attacked
        whose = OWN * bool(item.on)
        if whose and not diverged and "chance" in stages[item.stage]:
            fraction = stages[item.stage]["chance"][0]
        if guesses and fraction is not None:
            reasons.append(Doubt("chance", fraction, whose))
        elif is_attacked and fraction is not None and not above_chance(_pooled(item, outcomes), item.n, fraction):
            reasons.append(Doubt("majority", fraction, whose))
        if item.value > least_accuracy:  # else it exceeds none
            exceeded = _exceeded(item, accuracies, outcomes)
            reasons += (Doubt("order", excess, weak, item.label) for excess, weak in exceeded)
        if is_attacked and not item.is_transferred:
            reasons += [Doubt("gradient", dead)] if dead > ZERO_GRADIENTS else []
            reasons += [Doubt("directional", astray)] if astray > DIRECTIONAL else []
        if not math.isfinite(item.value):
            reasons.append(Doubt("not_finite"))
        if item.precision != "fp32":
            reasons.append(Doubt(item.precision))
    if outcomes is not None:
        for item in accuracies:
            for weak in _masked(item, accuracies, outcomes):
                doubts_by_stage[weak.stage].append(Doubt("masked", 100 * (weak.value - item.value)))
    return doubts_by_stage


def _pooled(item: _Accuracy, outcomes: Callable[[str], tuple[int, int]] | None) -> float:
    """The accuracy over all images: of a mean over clients on their own, that of those that train, who come first."""
    bits, total = outcomes(item.stage) if outcomes is not None and item.on else (0, 0)
    return (bits >> total - item.n).bit_count() / item.n if 0 < item.n <= total else item.value


# --- whether attacks contradict each other -----------------------------------------------------------------------


def _role(attack: Mapping[str, Any]) -> str:
    """The role of an attack; empty where its function is not installed."""
    own_settings = attack_of(attack)
    try:
        return facts.role(own_settings) if own_settings.get("name") in names("Attack") else ""
    except FatbenchError:
        return ""


def _exceeded(
    strong: _Accuracy, all_of_model: Collection[_Accuracy], outcomes: Callable[[str], tuple[int, int]] | None
) -> Iterable[tuple[float, str]]:
    """(excess, label) of each weaker attack that leaves fewer images right than this one."""
    for weak in all_of_model:
        if not strong.value > weak.value or weak.stage not in strong.weaker:
            continue
        paired = None
        if outcomes is not None and weak.n == strong.n:
            paired = discordant(outcomes(weak.stage), outcomes(strong.stage))
        if violated((weak.value, weak.n), (strong.value, strong.n), paired):
            origin_text = ", which was computed on another model," if weak.is_transferred else ""
            yield strong.value - weak.value, f"{weak.label}{origin_text}"


def _masked(
    strong: _Accuracy, all_of_model: Collection[_Accuracy], outcomes: Callable[[str], tuple[int, int]]
) -> list[_Accuracy]:
    """The gradient attacks that leave too many of the images right that AutoAttack breaks."""
    n = strong.n
    beside = [
        item
        for item in all_of_model
        if item.stage in strong.by_gradient
        and item.n == n
        and item.value - strong.value > MASKED_TOGETHER  # else no outcome need be read
        and item.precision == strong.precision
    ]
    if not beside or n < MASKED_IMAGES:
        return []
    (broken, stored), bits = outcomes(strong.stage), {item.stage: outcomes(item.stage) for item in beside}
    if {stored, *(count for _, count in bits.values())} != {n}:
        return []
    names, right = strong.by_gradient, {stage: held & ~broken for stage, (held, _) in bits.items()}
    by_all = functools.reduce(int.__and__, right.values())
    found = [item for item in beside if names[item.stage] != "fgsm"]
    if len(found) > 1 and "cw" in names.values() and _too_many(by_all, n, MASKED_TOGETHER):
        return found
    return [item for item in found if _too_many(right[item.stage], n, MASKED_ALONE)]


def _too_many(bits: int, n: int, gap: float) -> bool:
    """Whether a true gap of at most `gap` leaves so many images of n: the exact one-sided binomial test."""
    return binomial_tail(bits.bit_count(), n, gap) < MASKED_LEVEL


def weaker(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether attack b, on the same model, must leave no more images right than attack a does."""
    if "origin" in b or not a or not b:
        return False
    a, b = ({key: value for key, value in attack.items() if key != "implementation"} for attack in (a, b))
    if "origin" in a:
        another_model = str(a["origin"]).startswith("cell ")
        return another_model and {key: value for key, value in a.items() if key != "origin"} == b
    if isinstance(a.get("attack"), Mapping) or isinstance(b.get("attack"), Mapping):  # one in another
        inner_a, inner_b = a.pop("attack", None), b.pop("attack", None)
        return a == b and isinstance(inner_a, Mapping) and isinstance(inner_b, Mapping) and weaker(inner_a, inner_b)
    if a["name"] == "natural":
        return _role(b) == "attack"
    if a.get("norm", "Linf") != b.get("norm", "Linf") or number(a.get("eps", 0)) > number(b.get("eps", 0)):
        return False
    shared = a.keys() & b.keys() - {"name", "eps", "step", "steps", "norm"}
    if any(a[key] != b[key] for key in shared):
        return False
    if a["name"] == b["name"]:
        smaller = number(a.get("eps", 0)) < number(b.get("eps", 0)) or a.get("steps", 0) < b.get("steps", 0)
        return a.keys() == b.keys() and smaller and number(a.get("steps", 0)) <= number(b.get("steps", 0))
    return STRENGTH.get(a["name"], math.nan) < STRENGTH.get(b["name"], math.nan)


def discordant(weak: tuple[int, int], strong: tuple[int, int]) -> tuple[int, int] | None:
    """(b, c): images right only under the stronger, and only under the weaker attack. None: not the same images."""
    if weak[1] != strong[1] or weak[1] == 0:
        return None
    return (strong[0] & ~weak[0]).bit_count(), (weak[0] & ~strong[0]).bit_count()


def violated(weak: tuple[float, int], strong: tuple[float, int], paired: tuple[int, int] | None = None) -> bool:
    """Whether the stronger attack's accuracy exceeds the weaker one's beyond sampling error. Each is (accuracy, n)."""
    if paired is not None:
        b, c = paired
        return b - c > SIGMAS * math.sqrt(b + c)
    (p, n), (q, m) = weak, strong
    if n == 0 or m == 0:
        return False
    return q - p > SIGMAS * math.sqrt(p * (1 - p) / n + q * (1 - q) / m)


# --- whether a network has learned -------------------------------------------------------------------------------


def chance(data: Mapping[str, Any], stored_chance: float | None = None, n: int | None = None) -> float | None:
    """The accuracy of a constant classifier on n test images of a data set; None: unknown.

    It is `stored_chance`, the fraction of the most frequent class of these images, where the evaluation has stored it.
    Else it is one over the number of classes, but only on a whole test set with as many images of each class:
    elsewhere a network that always says the same would pass for one that has learned.
    """
    if stored_chance is not None:
        return stored_chance
    dataset = CATALOGUE.get(data.get("name", ""))
    if dataset is None or not dataset.balanced or n != dataset.test:
        return None
    return 1 / dataset.classes if dataset.classes else None


@functools.cache
def above_chance(accuracy: float, n: int, fraction: float) -> bool:
    """Whether `accuracy` on n images is above `fraction`: the exact one-sided binomial test, p < LEVEL.

    Of several models on the same images the accuracy is their mean, and the test takes it as one model's.
    """
    if not math.isfinite(accuracy):
        return True  # which is no number: its own doubt
    correct = round(accuracy * n)
    deviations = (correct - n * fraction) / math.sqrt(n * fraction * (1 - fraction)) if 0 < fraction < 1 and n else 0.0
    if not 0 < deviations < 10:  # p <= 1 / (1 + 10^2) by Cantelli's inequality: most cells need no sum
        return deviations >= 10
    return binomial_tail(correct, n, fraction) < LEVEL


def leaves_chance(p: float, checks: int) -> bool:
    """Whether one of so many checks, with this p, shows a model above chance: Bonferroni's correction."""
    return p < LEVEL / checks
