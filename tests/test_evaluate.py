"""External models: read, checked for plausibility, attacked, stored, shown beside suites' cells."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from crew import SUITE as CREW
from safetensors.torch import save_file
from torch import Tensor, nn

import fatbench
from fatbench.data import DATASETS
from fatbench.engine import plausible
from fatbench.engine.accuracy import unpacked
from fatbench.errors import SpecError
from fatbench.methods.intervals import wilson
from fatbench.models import external_network as networks
from fatbench.report.numbers.stored import accuracies
from fatbench.runner import evaluate_external
from fatbench.runner.checkpoints import load_model
from fatbench.runner.evaluate_checkpoint import trained_radius
from fatbench.store.stage_names import parsed
from fatbench.store.stages import Store
from fatbench.suite import cells, external_models, files, signatures
from fatbench.suite.external_models import Model

ROOT = Path(__file__).parent.parent
NETWORK = """
import torch
from torch import nn

def make(*more, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes), *more)

def softmax():
    return make(nn.Softmax(1))

def sigmoid():
    return make(nn.Sigmoid())

class Noise(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, training=True)

def noisy():
    return make(Noise())

def two():
    return make(classes=2)

class Odd(nn.Sequential):
    def __init__(self, how):
        super().__init__(nn.Flatten(), nn.Linear(64, 10))
        self.how = how

    def forward(self, x):
        if self.how == "masked":
            return super().forward(x.detach()) + 1e-6 * x.sum((1, 2, 3))[:, None] * torch.arange(10)
        level = (x * 0.4 + 0.3) * 16
        attacked = ((level - level.round()).abs() > 0.06).flatten(1).any(1)
        return super().forward(x).masked_fill(attacked[:, None], float("nan"))

def masked():
    return Odd("masked")

def fragile():
    return Odd("fragile")

def broken():
    raise KeyError("no such layer")

not_a_network = dict
"""
# A script as anybody would write it: it knows nothing of fatbench.
SCRIPT = """
import torch
from sklearn.datasets import load_digits
from my_model import make

torch.manual_seed(0)
digits = load_digits()
x = torch.tensor(digits.images[:1400], dtype=torch.float32)[:, None] / 16
y = torch.tensor(digits.target[:1400])
net = make()
optimizer = torch.optim.Adam(net.parameters(), 1e-2)
for _ in range(80):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net((x - 0.3) / 0.4), y).backward()
    optimizer.step()
torch.save(net.state_dict(), "my.pt")
"""

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a network's file and the weights that SCRIPT trained."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "my_model.py").write_text(NETWORK)
    (folder / "train.py").write_text(SCRIPT)
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng():
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        runpy.run_path("train.py")
        del sys.modules["my_model"]
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("my_model.py", "my.pt"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def run(run: Run) -> Run:
    """The program, of a command as it is typed."""
    return lambda command: run(*shlex.split(command)[1:])


MINE = "fatbench evaluate my.pt --model my_model.py:make --dataset digits --mean 0.3 --std 0.4 --images 40"


def by_hand(state: dict[str, Tensor], n: int, move: float = 0.0) -> Tensor:
    """Which of the first n digits W (x - 0.3) / 0.4 + b gets right, after a step of `move` up the loss by the image.

    d loss / d x = W^T (softmax - onehot) / 0.4.
    """
    data = DATASETS["digits"](Path())
    x = torch.from_numpy(data.test_images[:n]).float().flatten(1) / 255
    y = torch.from_numpy(data.test_labels[:n]).long()
    weight, bias = state["1.weight"], state["1.bias"]

    def logits(x: Tensor) -> Tensor:
        return (x - 0.3) / 0.4 @ weight.T + bias

    off = logits(x).softmax(1) - nn.functional.one_hot(y, 10)
    x = (x + move * (off @ weight).sign()).clamp(0, 1)
    return logits(x).argmax(1) == y


# --- the numbers --------------------------------------------------------------------------------------------------


def test_a_linear_network_by_hand(here: Path, run: Run) -> None:
    """natural and FGSM, image by image, from the closed form of a linear network's gradient."""
    code, out, _ = run(f"{MINE} --attack fgsm --eps 0.1 --format json")
    assert code == 0
    found = json.loads(out)
    state = torch.load(here / "my.pt", weights_only=True)
    with Store.open("results/fatbench.db") as store:
        stages = {stage.split("-")[0]: stage for _, stage in store.stages([found["cell"]])}
        for metric, move in (("natural", 0.0), ("fgsm", 0.1)):
            expected = by_hand(state, 40, move)
            ((start, n, bits),) = store.outcomes(found["cell"], stages[metric])
            assert (start, n) == (0, 40)
            assert numpy.array_equal(unpacked(bits, n), expected.numpy())
            assert found["tables"][0]["rows"][0]["measured"][metric]["mean"] == expected.double().mean()
    assert found["doubts"] == []
    natural, fgsm = (float(by_hand(state, 40, move).double().mean()) for move in (0.0, 0.1))
    assert natural > 0.8 > fgsm


def test_the_same_command_does_nothing_again_and_another_attack_only_itself(here: Path, run: Run) -> None:
    first = run(f"{MINE} --attack fgsm")
    second = run(f"{MINE} --attack fgsm")
    assert first[1] == second[1] and "fgsm" in first[2] and second[2] == ""
    _, out, err = run(f"{MINE} --attack 'weak={{name: pgd, eps: 1/255, step: 1/255, steps: 2}}'")
    assert err.splitlines() == ["attack weak"]
    assert re.search(r"weak .* pgd\(eps=1/255, step=1/255, steps=2\)", out)


def test_more_images_than_there_are_are_all_of_them(here: Path, run: Run) -> None:
    """Their number is that of the data set, without a mark; database and export are whole."""
    code, out, err = run(f"{MINE.replace('--images 40', '--images 400')} --attack fgsm --strict")
    assert code == 0 and "355 images" in out and "†" not in out, err
    assert run("fatbench check")[0] == 0
    assert run("fatbench export -o x.jsonl")[0] == run("fatbench import x.jsonl --db other.db")[0] == 0
    assert run("fatbench check --db other.db")[0] == 0


def test_a_row_is_of_one_radius_and_one_number_of_images(here: Path, run: Run) -> None:
    """What has no radius stands in each row of its images; a suite's row finds the attack that it asks for."""
    mine = MINE.replace(" --images 40", "")
    for images, eps, attack in ((40, 0.05, "fgsm"), (60, 0.1, "fgsm"), (60, 0.2, "cw")):
        out = run(f"{mine} --images {images} --eps {eps} --attack {attack} --format json")[1]
    state = torch.load(here / "my.pt", weights_only=True)
    rows = [(row["key"], row["measured"]) for row in json.loads(out)["tables"][0]["rows"]]
    assert [(key["radius"], key["images"]) for key, _ in rows] == [("0.05", "40"), ("0.1", "60"), ("0.2", "60")]
    means = [{metric: one["mean"] for metric, one in measured.items()} for _, measured in rows]
    natural, other = ({"natural": by_hand(state, n).double().mean().item()} for n in (40, 60))
    assert means[0] == natural | {"fgsm": by_hand(state, 40, 0.05).double().mean().item()}
    assert means[1] == other | {"fgsm": by_hand(state, 60, 0.1).double().mean().item()}
    assert {**means[2], "cw": 0} == other | {"cw": 0}
    assert {one["n"] for one in rows[0][1].values()} == {40}
    status = run("fatbench status evaluate")[1]
    assert "0.05; 0.1; 0.2" in status and "40; 60" in status


def test_no_attack_runs_on_a_model_that_is_not_as_accurate_as_its_owner_says(here: Path, run: Run) -> None:
    """A normalisation that was forgotten is seen; a difference that so few images explain is none."""
    accuracy = 100 * by_hand(torch.load(here / "my.pt", weights_only=True), 40).double().mean().item()
    assert run(f"{MINE} --attack fgsm --expect-natural {accuracy - 1}")[0] == 0
    wrong = MINE.replace("--mean 0.3", "--mean 3")
    code, out, err = run(f"{wrong} --attack fgsm --expect-natural {accuracy}")
    assert (code, out) == (6, "") and "fgsm" not in err and "Traceback" not in err
    last = err.splitlines()[-1]
    assert last.startswith(f"fatbench: --expect-natural {accuracy:g}: natural accuracy is ")
    assert "of 40 images (95 % interval " in last and last.endswith("No attack was run")
    low, high = map(float, re.findall(r"interval ([\d.]+) to ([\d.]+)", last)[0])
    right = round(float(re.findall(r"is ([\d.]+) %", last)[0]) * 40 / 100)
    assert (low, high) == tuple(round(100 * end, 2) for end in wilson(right, 40)) and high < accuracy
    code, _, err = run("fatbench evaluate my.pt --strict --expect-natural 98")
    assert code == 2 and "my.pt is no checkpoint of a run; a state dict needs --model" in err


def test_what_is_flagged_ends_with_its_own_code_under_strict(here: Path, run: Run) -> None:
    assert run(f"{MINE} --attack fgsm --strict")[0] == 0
    wrong = MINE.replace("--mean 0.3", "--mean 3")
    code, out, err = run(f"{wrong} --attack fgsm --strict")
    assert code == 6 and "my.pt on digits" in out and "--strict: " in err and "natural accuracy is at chance" in err
    assert run(f"{wrong} --attack fgsm")[0] == 0


# --- identity -----------------------------------------------------------------------------------------------------


def spec(**changes: object) -> dict[str, object]:
    fields = {"name": "a.pt", "sha256": "0" * 64, "network": "timm/resnet18", **changes}
    return external_models.cell(Model(**fields), "digits")  # type: ignore[arg-type]


def test_the_identity_is_the_content() -> None:
    same = cells.identity(spec())
    assert cells.identity(spec(name="b.pt")) == same
    changes = (
        {"sha256": "1" * 64}, {"network": "timm/resnet34"}, {"code": "2" * 64}, {"outputs": "probabilities"},
        {"mean": (0.5,), "std": (0.5,)},
    )  # fmt: skip
    assert len({same, *(cells.identity(spec(**change)) for change in changes)}) == 6
    assert cells.identity(external_models.cell(Model("a.pt", "0" * 64, "timm/resnet18"), "digits", size=16)) != same


def test_a_file_s_digest_and_its_network_s_are_stored(here: Path, run: Run) -> None:
    assert run(f"{MINE} --attack fgsm --name 'Our net'")[0] == 0
    with Store.open("results/fatbench.db") as store:
        ((_, stored),) = store.cells().items()
    said = stored["evaluated"]
    assert said["sha256"] == hashlib.sha256((here / "my.pt").read_bytes()).hexdigest()
    assert said["code"] == hashlib.sha256((here / "my_model.py").read_bytes()).hexdigest()
    assert (said["name"], said["network"], said["mean"]) == ("Our net", "my_model.py:make", [0.3])
    (file,) = here.rglob("model-*.safetensors")
    model, own, header = load_model(file, "cpu")
    assert header == {"cell": file.parent.name, "round": "1", "classes": "10"} and own == {}
    state = torch.load(here / "my.pt", weights_only=True)
    stored, trained = ({name.rpartition(".")[2]: v.tolist() for name, v in one.items()} for one in (model, state))
    assert stored == trained


def test_safetensors_and_wrapped_states_are_the_same_model(here: Path, run: Run) -> None:
    """Names with "module." (DataParallel) and a dictionary around the state, as training scripts write them."""
    state = torch.load(here / "my.pt", weights_only=True)
    save_file(state, here / "my.safetensors")
    torch.save({"net": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}, here / "wrapped.pth")
    for name in ("my.safetensors", "wrapped.pth"):
        external = evaluate_external.from_file(here / name, "my_model.py:make")
        said = networks.load(network := external.build((1, 8, 8), 10), name, external.state)
        assert said == ("wrapped.pth: names without 'module.' before them" if name == "wrapped.pth" else "")
        assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    for options in ("", " --dataset digits"):  # a run's models end so, too
        code, _, err = run(f"fatbench evaluate my.safetensors{options}")
        assert code == 2 and "my.safetensors is no checkpoint of a run; a state dict needs --model" in err


# --- what a network sees ------------------------------------------------------------------------------------------


class First(nn.Module):
    """The first channel's pixel and the last channel's."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x[:, 0, 0, 0], x[:, 2, 0, 0]], 1)


def test_preprocessing_by_hand() -> None:
    """RGB (0.2, 0.5, 0.8): BGR is (0.8, 0.5, 0.2); less the mean (0.1, 0, 0.2), over std (0.5, 1, 2).

    Probabilities become logits with the same softmax.
    """
    x = torch.tensor([0.2, 0.5, 0.8]).view(1, 3, 1, 1)
    plain = networks.Preprocessed(First())
    torch.testing.assert_close(plain(x), torch.tensor([[0.2, 0.8]]))
    both = networks.Preprocessed(First(), (0.1, 0.0, 0.2), (0.5, 1.0, 2.0), channels="bgr")
    torch.testing.assert_close(both(x), torch.tensor([[1.4, 0.0]]))
    assert both.state_dict() == {}
    chances = torch.tensor([[0.7, 0.2, 0.1], [1.0, 0.0, 0.0]])
    model = networks.Preprocessed(nn.Identity(), outputs="probabilities")
    torch.testing.assert_close(model(chances[:, :, None, None]).flatten(1).softmax(1), chances)


# --- what is implausible ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "flag", "advice"),
    [
        ("--model my_model.py:make --mean 0.3 --std 0.0001", "the loss has no gradient on more than 1%", None),
        ("--model my_model.py:noisy", plausible.RANDOM, "two passes over the same images differ"),
        ("--model my_model.py:softmax", plausible.PROBABILITIES, "say outputs: probabilities"),
        ("--model '{name: my_model.py:make, outputs: probabilities}'", plausible.NOT_PROBABILITIES,
         "say outputs: logits"),
        ("--model my_model.py:sigmoid --mean 0.3 --std 0.4", plausible.SIGMOID, "say outputs: sigmoid if"),
    ],
)  # fmt: skip
def test_doubts_are_said_and_stand_in_the_table(here: Path, run: Run, options: str, flag: str, advice: str) -> None:
    code, out, err = run(f"fatbench evaluate my.pt {options} --dataset digits --images 40 --attack fgsm")
    assert code == 0
    assert flag in out and flag in err
    assert advice is None or advice in err


def test_nan_under_attack_is_wrong_and_marked(here: Path, run: Run) -> None:
    """It was counted as class 0: FGSM of one in ten. Only attacked images leave the seventeen levels of the data."""
    code, out, err = run(f"{MINE.replace(':make', ':fragile')} --attack fgsm --attack pgd20 --strict")
    assert out.startswith("robust accuracy 0.0 % (0 to 9), Linf 8/255, ")
    (natural,) = re.findall(r"^ *natural +([\d.]+) %", out, re.MULTILINE)
    assert float(natural) > 90 and len(re.findall(r"^ *(?:FGSM|PGD-20) +0\.00 %†", out, re.MULTILINE)) == 2
    assert code == 6 and "† outputs of 40 images are not finite: they count as wrong" in out
    assert "--strict: " in err and "outputs of 40 images" in err


def test_a_network_whose_gradient_is_another_is_marked_under_every_attack(here: Path, run: Run) -> None:
    """Its input is detached, and a millionth of the pixels added: FGSM and PGD cannot move it."""
    code, out, err = run(f"{MINE.replace(':make', ':masked')} --attack fgsm --attack pgd20 --eps 0.2 --strict")
    assert code == 6 and "† gradients do not follow the loss, on 100% of the images tried" in out
    assert len(re.findall(r"^ *(?:FGSM|PGD-20) +[\d.]+ %†", out, re.MULTILINE)) == 2
    assert re.search(r"^ *natural +[\d.]+ % ", out, re.MULTILINE)  # which is right
    assert "--strict: " in err and "gradients do not follow the loss" in err
    assert run("fatbench check")[0] == 0
    assert run(f"{MINE} --attack fgsm --attack pgd20 --eps 0.2 --strict")[0] == 0


@pytest.mark.parametrize(
    ("made", "marks"),
    [
        ("x + 0.3 * (1 - 2 * x).sign()", ["an attack moves an image by 0.3, beyond its radius"]),
        ("x + 0.03", ["an attack leaves the pixel range by 0.03"]),
        ("x / 0 * 0", ["40 attacked images are not finite", "outputs of 40 images are not finite"]),
    ],
)
def test_an_attack_that_leaves_its_ball_is_marked(here: Path, run: Run, made: str, marks: list[str]) -> None:
    head = "def mine(model, x, y, generator, *, eps: float = 0.03):"
    (here / "attacks.py").write_text(f'{head}\n    return {made}\n\n\nATTACKS = {{"mine": mine}}\n')
    try:
        code, out, err = run(f"{MINE} --attack mine --plugin attacks.py --strict")
    finally:
        signatures.drop_plugins([here / "attacks.py"])
    assert code == 6 and all(mark in out and mark in err for mark in marks)


def test_a_model_at_chance_is_said_to_be(here: Path, run: Run) -> None:
    torch.save({"1.weight": torch.zeros(10, 64), "1.bias": torch.arange(10.0)}, here / "my.pt")
    _, out, err = run(f"{MINE} --attack fgsm")
    assert "† natural accuracy is at chance" in out
    assert run("fatbench check")[0] == 0
    assert "check mean, std, channels, size and the order of classes" in err


@pytest.mark.parametrize(("network", "outputs"), [("softmax", "probabilities"), ("sigmoid", "sigmoid")])
def test_outputs_that_are_what_is_declared_give_the_numbers_of_logits(
    here: Path, run: Run, network: str, outputs: str
) -> None:
    declared = MINE.replace("my_model.py:make", f"'{{name: my_model.py:{network}, outputs: {outputs}}}'")
    found, plain = (json.loads(run(f"{command} --attack fgsm --format json")[1]) for command in (declared, MINE))
    assert found["doubts"] == []
    first, second = (one["tables"][0]["rows"][0]["measured"]["fgsm"]["mean"] for one in (found, plain))
    assert first == second


# --- what a person can get wrong ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("my.pt", 2, "my.pt is no checkpoint of a run; a state dict needs --model timm/NAME or --model FILE.py:"),
        ("junk.pt --model my_model.py:make --dataset digits", 5,
         "cannot read junk.pt: not a file that torch.save or safetensors wrote"),
        ("pickled.pt --model my_model.py:make --dataset digits", 2,
         "pickled.pt holds pickled Python objects, not a state"),
        ("my.pt --dataset digits", 2, "my.pt is no checkpoint of a run; a state dict needs --model timm/NAME or"),
        ("my.pt --model my_model.py:make", 2, "--dataset: name the data set"),
        ("no.pt --model my_model.py:make --dataset digits", 5, "no.pt: no such file"),
        ("my.pt --model my_model.py:mak --dataset digits", 2,
         "my_model.py has no function 'mak' (did you mean 'make'?)"),
        ("my.pt --model other.py:make --dataset digits", 2, "--model: no such file: other.py"),
        ("my.pt --model resnet181 --dataset digits", 2, "expected timm/NAME or FILE.py:FUNCTION, got 'resnet181'"),
        ("my.pt --model timm/resnet81 --dataset digits", 2, "timm has no network 'resnet81' (did you mean 'resnet"),
        ("my.pt --model my_model.py:broken --dataset digits", 5, "my_model.py:broken(): KeyError: 'no such layer'"),
        ("my.pt --model my_model.py:not_a_network --dataset digits", 2, "returned a dict, not a torch.nn.Module"),
        ("my.pt --model my_model.py:two --dataset digits", 2,
         "my.pt holds another network's weights: 1.weight is 10x64, 2x64 need"),
        ("my.pt --model '{name: my_model.py:make, size: 16}' --dataset digits", 2, "does not take images of 1x16x16"),
        ("my.pt --model my_model.py:make --dataset digit", 2, "no data is named 'digit' (did you mean 'digits'?)"),
        ("my.pt --model my_model.py:make --dataset digits --mean 0.5", 2, "--mean and std go together"),
        ("my.pt --model my_model.py:make --dataset digits --mean 0,0 --std 1,1", 2,
         "2 numbers for images of 1 channels"),
        ("my.pt --model my_model.py:make --dataset digits --mean x --std 1", 2, "--mean: expected numbers such as 0.5"),
        ("my.pt --model '{name: my_model.py:make, channels: bgr}' --dataset digits", 2,
         "images of digits have 1 channel"),
        ("my.pt --model '{name: my_model.py:make, outputs: log}' --dataset digits", 2,
         "expected logits, probabilities or sigmoid, got 'log'"),
        ("my.pt --model my_model.py:make --dataset digits --eps big", 2,
         "--eps: expected a part of the pixel range such as 8/255 or 0.03"),
        ("my.pt --model my_model.py:make --dataset digits --attack pgd2", 2, "no attack is named 'pgd2'"),
        ("my.pt --model my_model.py:make --dataset digits --attack PGD-20", 2, "(did you mean 'pgd20'?)"),
        ("my.pt --model my_model.py:make --dataset digits --attack '{name:pgd}'", 2, "a space after each colon"),
        ("my.pt --model my_model.py:make --dataset Digits", 2, "(did you mean 'digits'?)"),
        ("my.pt --model my_model.py:make --dataset digits --expect-natural 0.98", 2,
         "per cent such as 95 (and not 0.95)"),
        ("my.pt --model my_model.py:make --like sfat-cifar10 --smoke --images 5", 2,
         "--like sfat-cifar10 says which images and attacks; leave out attacks"),
        ("my.pt --model my_model.py:make --like sfat-cifar10 --dataset svhn", 2, "no cell is on svhn"),
        ("my.pt --model my_model.py:make --dataset digits --smoke", 2, "name it with --like NAME"),
    ],
)  # fmt: skip
def test_mistakes(here: Path, run: Run, arguments: str, code: int, message: str) -> None:
    Path("junk.pt").write_bytes(b"\xff" * 300)
    torch.save(nn.Linear(2, 2), "pickled.pt")
    found, out, err = run(f"fatbench evaluate {arguments}")
    assert message in err and err.count("\n") == 1 and "\x1b" not in err
    assert (found, out) == (code, "")


def test_a_task_like_a_suite_s_cells() -> None:
    """Cells of one data set make one task, also if only one of them faces AutoAttack; a cell of another size makes two.

    So does a cell that faces another attack under the same name.
    """
    plan = files.load("sfat-cifar10").plan("smoke")
    first, *_, most = sorted(plan.cells, key=lambda cell: len(cell.evaluations))
    task = evaluate_external.task_like(plan)
    assert (task.data, task.test) == (first.spec["data"], first.spec["test"])
    assert {one.id for one in first.evaluations} < {one.id for one in most.evaluations}
    assert {one.id for one in task.evaluations} == {one.id for one in most.evaluations}
    other = replace(first.evaluations[1], n=7)
    for changes in ({"spec": {**first.spec, "size": 16}}, {"evaluations": (first.evaluations[0], other)}):
        cell = replace(first, **changes)
        with pytest.raises(SpecError, match="its cells differ in data, size or attacks: choose some by a filter"):
            evaluate_external.task_like(replace(plan, cells=[*plan.cells, cell]))


# --- the whole way ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_plain_script_s_model_stands_beside_a_suite_s_rows(here: Path, run: Run, tmp_path: Path) -> None:
    """The commands of docs/evaluate.md in order, on what SCRIPT trained; then its cell goes to another database."""
    page = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shown = [run(command) for block in blocks for command in block.strip().splitlines()]
    assert [code for code, _, _ in shown] == [0] * 5
    full, extra, _, like, both = (out for _, out, _ in shown)
    assert "AutoAttack" in full and "CW" in full
    assert re.search(r"PGD-50 .* pgd\(eps=8/255, step=1/255, steps=50", extra)
    rows = [line for line in both.splitlines() if line.startswith("| ")]
    digest = hashlib.sha256((here / "my.pt").read_bytes()).hexdigest()
    mine = [line for line in rows if f"my.pt [{digest[:8]}]" in line]
    assert mine and any("SFAT" in line for line in rows) and rows.index(mine[0]) > 0
    assert "**" not in mine[0] and "<u>" not in mine[0]  # it competes with nobody
    measured = re.findall(r"\d+\.\d\d", like)
    assert {*re.findall(r"\d+\.\d\d", mine[0])} <= {*measured}
    assert f"external model: my.pt (SHA-256 {digest})" in both

    assert "evaluate" in run("fatbench status")[1]
    assert "2 done, 0 failed" in run("fatbench status evaluate")[1]  # of all test images, and of the suite's first 100
    everything = run("fatbench report evaluate")
    assert everything[0] == 0 and re.search(r"natural \| +FGSM \| +PGD-20 \| +CW \| +AA \|", everything[1])
    cell = json.loads(run(f"{MINE.replace('--images 40', '--images 60')} --format json")[1])["cell"]
    assert "AutoAttack" in run(f"fatbench show {cell}")[1] and "natural=" in run(f"fatbench show {cell} --log")[1]
    assert run("fatbench export -o all.jsonl")[0] == 0
    assert run("fatbench import all.jsonl --db other.db")[0] == 0
    again = run("fatbench import all.jsonl --db other.db")[1]
    assert re.search(r": \d+ cells, \d+ numbers already here$", again.strip())
    assert run("fatbench report evaluate --db other.db")[1] == everything[1]


def test_checkpoints_of_runs_are_evaluated_as_before(here: Path, run: Run) -> None:
    Path("crew.yaml").write_text(CREW)
    done = fatbench.run("crew.yaml", where="pace=slow", jobs=1, quiet=True)
    file = next(Path("results/fatbench-files", done["cell"][0]).glob("model-*.safetensors"))
    attacks = "--attack natural --attack '{name: fgsm, eps: 8/255}'"
    code, out, _ = run(f"fatbench evaluate {file} --images 20 {attacks} --format json")
    assert code == 0
    assert [(row["label"], row["n"]) for row in json.loads(out)["results"]] == [("natural", 20), ("fgsm", 20)]
    assert f"{file}: without --model it is read as a checkpoint" in run(f"fatbench evaluate {file} --dataset digits")[2]
    # like its suite: the very numbers of the run
    code, out, _ = run(f"fatbench evaluate {file} --like crew.yaml --format json")
    evaluated_again = {row["label"]: row["accuracy"] for row in json.loads(out)["results"]}
    with Store.open("results/fatbench.db") as store:
        numbers = accuracies([done["cell"][0]], store)
    assert code == 0 and evaluated_again == {parsed(stage).metric: value for (_, stage), (value, _) in numbers.items()}
    said = run(f"fatbench evaluate {file} --like sfat-cifar10 --smoke")[2]
    assert "--like sfat-cifar10: test is 64 there, and 30 of " in said


@pytest.mark.parametrize(
    ("objective", "monitor", "radius"),
    [
        ({"name": "at", "attack": {"name": "pgd", "eps": "25/255"}}, {"name": "pgd", "eps": "25/255"}, "25/255"),
        ({"name": "standard"}, {"name": "natural"}, None),
        ({"name": "at", "attack": {"name": "pgd", "eps": 0.1}}, {"name": "pgd", "eps": 0.2}, None),
        ({"name": "at", "attack": {"name": "pgd", "eps": 0.5, "norm": "L2"}}, None, None),
    ],
)
def test_attacks_on_a_run_s_model_have_the_radius_of_its_training(objective: Any, monitor: Any, radius: Any) -> None:
    """A table at 25/255 and an attack of the same name at 8/255 would be two numbers under one name."""
    assert trained_radius({"algorithm": {"local": {"objective": objective}}, "monitor": monitor}) == radius


def test_a_network_and_an_attack_are_named_as_people_name_them(here: Path, run: Run) -> None:
    """module:attribute, a file with one network (its parts are none), a bare name of timm; attacks without settings."""
    net = "import torch.nn as nn\nclass Block(nn.Module):\n    pass\nclass Net(nn.Module):\n    block = Block\n"
    Path("net.py").write_text(net)
    Path("two.py").write_text("from torch.nn import Module\nclass A(Module): pass\nclass B(Module): pass\n")
    named = networks.full_name
    assert named("net:Net") == named("net.py") == "net.py:Net" == named("net.py:Net")
    assert named("resnet18") == named("timm/resnet18") == "timm/resnet18" and named("nothing") == "nothing"
    with pytest.raises(SpecError, match="expected one network, not A, B"):
        named("two.py")
    Path("one.py").write_text("from net import Net\nclass Normalised(Net):\n    pass\n")
    assert named("one.py") == "one.py:Normalised"  # whose base class another file has
    pgd, fgsm = external_models.evaluations(["pgd", "{name: fgsm}"], "0.1", 10, 5)[1:]
    assert (pgd.attack["eps"], pgd.attack["step"], pgd.attack["steps"], fgsm.attack["eps"]) == (0.1, 0.025, 20, 0.1)
