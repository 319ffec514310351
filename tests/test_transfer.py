"""Attacks computed on one model and judged on another, by models whose answers are known on paper.

Three models of images of two pixels: class 1 where what they look at is above the middle. "Left" looks at the left
pixel, "Right" at the right one, "Both" at their sum. FGSM moves a pixel that a model looks at by 0.2 to the wrong side,
and leaves the other, whose gradient is zero. Pixels of the four images (y = 1, 1, 0, 0), and after an attack on

    Left                          Right                         Both
    a .60 .65  ->  .40 .65        .60 .45                       .40 .45
    b .90 .55  ->  .70 .55        .90 .35                       .70 .35
    c .20 .35  ->  .40 .35        .20 .55                       .40 .55
    d .45 .10  ->  .65 .10        .45 .30                       .65 .30

Which of a, b, c, d each model still gets right there is read off: left pixel, right pixel and sum against .5, .5 and 1.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from crew import forget_plugins
from small import small

import fatbench
from fatbench.engine.rounds import Problem
from fatbench.errors import SpecError
from fatbench.report import build_figures, build_tables
from fatbench.runner import checkpoints, transfer, versions
from fatbench.runner.jobs import Event, Machine, Recovery
from fatbench.runner.start import jobs_of
from fatbench.runner.worker import work
from fatbench.store.numbers import remove
from fatbench.store.schema import OUTCOME_CHUNKS, ROUND_METRICS, STAGES
from fatbench.store.stages import Store
from fatbench.suite import files, plugins, signatures
from fatbench.suite.cells import TransferOrigin

MATRIX = {  # judged on -> computed on -> which of the images a, b, c, d are classified right
    "Left": {"Left": "0110", "Right": "1111", "Both": "0110"},
    "Right": {"Left": "1111", "Right": "0001", "Both": "0001"},
    "Both": {"Left": "1111", "Right": "1111", "Both": "0111"},
}
PLUGIN = '''
import numpy
import torch
from torch import nn

from fatbench.data import Dataset
from fatbench.engine.rounds import Cost, Round, State, Stats, Update
from fatbench.suite.entry import AlgorithmEntry, DataEntry, Images, ModelEntry, Work
from fatbench.suite.types import Count, Local, NonNegative


def two_pixels(root, *, inverted: bool = False):
    """Images of two pixels, the training images one step brighter than the test images."""
    x = numpy.array([[153, 166], [230, 140], [51, 89], [115, 26]], dtype=numpy.uint8)
    x = numpy.repeat(x.reshape(4, 1, 1, 2), 2, axis=2)
    y = numpy.array([1, 1, 0, 0])
    return Dataset(x + 1, y, x, y, 2, None, None, "two_pixels", None, "0" * 64)


class Looks(nn.Module):
    def __init__(self, left, right):
        super().__init__()
        self.at = nn.Parameter(torch.tensor([left, right]))

    def forward(self, x):
        score = ((x[:, 0, 0] - 0.5) * self.at).sum(1)
        return torch.stack([torch.zeros_like(score), score], 1)


def looks(shape, classes, *, left: NonNegative = 0.0, right: NonNegative = 0.0):
    """Above the middle?"""
    return Looks(left, right)


def still(problem, state, *, rounds: Count, local: Local, sends: bool = True):
    """Nobody learns anything; client 0 comes back as Left, client 1 as Right."""
    for t in range(state.round, rounds):
        stats = Stats(loss=0.0, loss_released=0.0, accuracy=1.0, steps=0, momentum_steps=0.0, batches=1)
        sent = [{"at": torch.tensor(one)} if sends else {} for one in ([1.0, 0.0], [0.0, 1.0])]
        updates = [Update(k, 2, sent[k], stats) for k in (0, 1)]
        state = State(t + 1, state.model)
        yield Round(t, state.model, updates, None, state, Cost())


def two(shape, classes):
    return 2


def nothing(cell):
    return Work()


DATASETS = {"two_pixels": DataEntry(two_pixels, images=Images(4, 4, 2, 2, 1))}
MODELS = {"looks": ModelEntry(looks, parameters=two)}
ALGORITHMS = {"still": AlgorithmEntry(still, work=nothing)}
'''
METHODS = "Left: {model: {name: looks, left: 1}}, Right: {model: {name: looks, right: 1}}"
SUITE = small(
    'figures: [{id: M, title: Moved, kind: matrix, lines: [method], series: {"from": moved}},\n'
    '  {id: C, title: Clients, kind: matrix, panels: [method], series: {"from": "among[*]"}}]\n',
    name="moved", plugins="[looking.py]", seeds="[3]", data="two_pixels", train="", test="", model="",
    algorithm="{name: still, rounds: 1, local: {batch: 4, lr: 0.1, objective: standard}}",
    axes=f"{{method: {{{METHODS}, Both: {{model: {{name: looks, left: 1, right: 1}}}}}}}}",
    evaluate="{batch: 3, attacks: {natural: natural, fgsm: {name: fgsm, eps: 0.2}},"
    " transfer: {moved: {attack: fgsm, axis: method}, among: {attack: fgsm, clients: 2}}}",
    tables='[{id: A, title: Judged on, rows: [method], values: {FGSM: fgsm, "from": moved}}]',
)  # fmt: skip


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty working folder with the suite moved.yaml and its plug-in."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    forget_plugins()
    (tmp_path / "looking.py").write_text(PLUGIN)
    (tmp_path / "moved.yaml").write_text(SUITE)
    yield tmp_path
    forget_plugins()


def machine(folder: Path, **more) -> Machine:
    here = signatures.of_plugins()
    return Machine(db=str(folder / "r.db"), files=str(folder / "files"), data=str(folder), plugins=here, **more)


def bits(store: Store, cell: str) -> dict[str, str]:
    """Metric -> the outcomes of its stage, as text."""
    found = {}
    for (_, stage), row in store.stages([cell]).items():
        if stage != "train" and row.status == "done":
            chunks = store.outcomes(cell, stage)
            text = "".join(bin(int.from_bytes(data, "big") + (1 << 8 * len(data)))[3 : 3 + n] for _, n, data in chunks)
            found[stage.rpartition("-")[0]] = text
    return found


def everything(folder: Path, jobs) -> list[str]:
    """Every job twice, as a run does; how each ended."""
    with Store.open(str(folder / "r.db"), create=True) as store:
        return [[work(job, machine(folder), store) for job in jobs] for _ in range(2)][1]


def test_a_matrix_over_methods_is_the_one_on_paper(place):
    suite = files.load("moved.yaml")
    plan = suite.plan()
    assert everything(place, jobs_of(plan)) == ["done"] * 3
    with Store.open(str(place / "r.db")) as store:
        for cell in plan.cells:
            judged = cell.key["method"]
            found = bits(store, cell.id)
            assert {on: found[f"moved_{on.lower()}"] for on in MATRIX} == MATRIX[judged]
            assert found["fgsm"] == MATRIX[judged][judged]
            # clients 0 and 1 came back as Left and Right: first judged on client 0, then on client 1
            assert found["among_client_0"] == MATRIX["Left"]["Left"] + MATRIX["Right"]["Left"]
            assert found["among_client_1"] == MATRIX["Left"]["Right"] + MATRIX["Right"]["Right"]
        (first,) = build_tables(suite, plan, store)
        shown = {row.key["method"]: [value.mean for value in row.values[0]] for row in first.rows}
        fraction = {judged: {on: text.count("1") / 4 for on, text in row.items()} for judged, row in MATRIX.items()}
        assert [column.heading for column in first.columns] == ["FGSM", "from Left", "from Right", "from Both"]
        assert shown == {judged: [row[judged], *row.values()] for judged, row in fraction.items()}
        (heat, clients) = build_figures(suite, plan, store)
        points = {(line.key["method"], line.heading): line.points[0].mean for line in heat.panels[0].lines}
        assert points == {(judged, f"from {on}"): fraction[judged][on] for judged in fraction for on in fraction}
        assert [(line.heading, line.index, line.points[0].mean) for line in clients.panels[0].lines] == [
            ("from client 1", 0, fraction["Left"]["Left"]), ("from client 1", 1, fraction["Right"]["Left"]),
            ("from client 2", 0, fraction["Left"]["Right"]), ("from client 2", 1, fraction["Right"]["Right"]),
        ]  # fmt: skip
        settings = [row.settings for (_, stage), row in store.stages().items() if stage.startswith("moved_right")]
    assert {one["origin"] for one in settings} == {f"cell {plan.cells[1].id}"}


def test_a_cell_waits_for_a_model_that_is_not_there_and_says_for_which(place):
    plan = files.load("moved.yaml").plan()
    left, right, both = jobs_of(plan)
    said: list[Event] = []
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(left, machine(place), store, said.append) == "waiting"
        (event,) = [event for event in said if event.kind == "waiting"]
        names = f"{right.cell} (Right), {both.cell} (Both)"
        assert event.message == f"for the model of {names}, which is not trained yet"
        assert set(bits(store, left.cell)) == {"natural", "fgsm", "moved_left", "among_client_0", "among_client_1"}
        assert not [row for row in store.stages([left.cell]).values() if row.status != "done"]
        alone = [replace(job, evaluations=[]) for job in (right, both)]
        assert [work(job, machine(place), store) for job in alone] == ["done", "done"]
        assert work(left, machine(place), store) == "done"
        assert bits(store, left.cell)["moved_right"] == "1111"


def test_a_stage_goes_on_where_it_was_stopped_and_begins_again_for_another_model(place):
    left, right, both = jobs_of(files.load("moved.yaml").plan())
    with Store.open(str(place / "r.db"), create=True) as store:
        for job in (right, both):
            work(replace(job, evaluations=[]), machine(place), store)
        moved = replace(left, evaluations=[one for one in left.evaluations if one.label == "moved_both"])
        work(replace(left, evaluations=[]), machine(place), store)
        assert work(moved, machine(place), store, stop=lambda: True) == "interrupted"  # after 3 of 4 images
        (stage,) = [stage for _, stage in store.stages([left.cell]) if stage != "train"]
        assert sum(n for _, n, _ in store.outcomes(left.cell, stage)) == 3
        assert store.stages([left.cell])[left.cell, stage].total == 4
        events: list[Event] = []
        assert work(moved, machine(place), store, events.append) == "done"
        assert [(event.kind, event.round, event.total) for event in events] == [
            ("start", 3, 4), ("progress", 4, 4), ("done", 4, 4)
        ]  # fmt: skip
        assert bits(store, left.cell) == {"moved_both": MATRIX["Left"]["Both"]}
        finished = store.stages([left.cell])[left.cell, stage]
        assert set(finished.record) == {"model", "origin", "requested"}
        # results that say nothing of their models, as imported ones, are kept where they are whole ...
        with store.database.writing() as connection:
            connection.execute(STAGES.update().where(STAGES.c.stage == stage).values(record="{}"))
        assert work(moved, machine(place), store, events.append) == "done" and len(events) == 3
        # ... and done again where they are not: their beginning may be about another model
        with store.database.writing() as connection:
            here, chunks = STAGES.c.stage == stage, OUTCOME_CHUNKS.c.stage == stage
            connection.execute(STAGES.update().where(here).values(record="{}", status="interrupted", round=3))
            connection.execute(OUTCOME_CHUNKS.delete().where(chunks, OUTCOME_CHUNKS.c.start == 3))
            connection.execute(OUTCOME_CHUNKS.update().where(chunks).values(bits=bytes([0b10000000])))
            remove(connection, ROUND_METRICS.c.stage == stage)
        assert work(moved, machine(place), store) == "done"
        assert bits(store, left.cell) == {"moved_both": MATRIX["Left"]["Both"]}
        assert store.stages([left.cell])[left.cell, stage].record == finished.record
        # the other cell has another model by now, which looks at nothing: its attack moves nothing
        row = store.stages([both.cell])[both.cell, "train"]
        file = checkpoints.model_file(1)
        header = {"cell": both.cell, "round": "1"}
        new = checkpoints.save_model(place / "files" / both.cell / file, {"at": torch.zeros(2)}, {}, **header)
        made_by = {"plugins": plugins.records(plugins.used(both.spec))}
        run = store.claim(both.cell, "train", suite="moved", total=1, provenance=made_by, fresh=True)
        store.finish(run, round=1, record={**row.record, "sha256": {file: new}})
        assert list(versions.changed([moved], store)[left.cell]) == [stage]
        assert work(moved, machine(place), store) == "done"
        assert bits(store, left.cell) == {"moved_both": MATRIX["Left"]["Both"]}  # kept until it is asked for
        assert work(moved, machine(place, recovery=Recovery(rerun_changed=True)), store) == "done"
        assert bits(store, left.cell) == {"moved_both": "1111"}
        assert versions.changed([moved], store) == {}


@pytest.mark.slow
def test_the_command_comes_back_to_what_waits_and_says_what_still_does(place, run, forks):
    def said(*arguments: str) -> tuple[int, str]:
        forget_plugins()
        code, out, err = run(*arguments)
        return code, out + err

    code, err = said("run", "suite", "moved.yaml", "-k", "method=Left", "--jobs", "1")
    assert code == 1 and "0 of 1 cells done, 1 not finished" in err
    assert err.count("waiting: for the model of ") == 2 and "Right" in err and "Both" in err
    code, err = said("run", "suite", "moved.yaml", "--jobs", "1")
    assert code == 0 and "3 of 3 cells done" in err
    with Store.open("results/fatbench.db") as store:
        assert {text for cell in store.cells() for text in [bits(store, cell)["natural"]]} == {"1111"}
    frame = fatbench.results("moved.yaml")
    one = frame[(frame["metric"] == "moved_both") & (frame["client"] == -1)]
    assert dict(zip(one["method"], one["value"], strict=True)) == {"Left": 0.5, "Right": 0.25, "Both": 0.75}
    assert "origin=cell" in one["attack"].iloc[0]
    text = fatbench.table("moved.yaml", "A").markdown()
    assert "computed on=Both's model" in text
    # the attacked model's plug-in is edited: what was judged under it is of an older version, in every cell
    edited = PLUGIN.replace("class Looks(nn.Module):", "class Looks(nn.Module):\n    edited = 1\n")
    (place / "looking.py").write_text(edited)
    code, out = said("run", "suite", "moved.yaml", "--dry-run")
    assert "3 cells were computed with other inputs than today's and are kept" in out
    code, err = said("plot", "moved.yaml", "--format", "svg")
    assert code == 0 and Path("results/figures/moved-M.svg").is_file()


def test_a_cell_that_was_trained_before_clients_were_asked_for_says_what_to_do(place):
    (left, *_) = jobs_of(files.load("moved.yaml").plan())
    among = [one for one in left.evaluations if one.sweep == "among"]
    with Store.open(str(place / "r.db"), create=True) as store:
        assert work(replace(left, evaluations=[]), machine(place), store) == "done"
        assert not list((place / "files" / left.cell).glob("clients-*"))
        assert work(replace(left, evaluations=among), machine(place), store) == "failed"
        errors = {row.error for row in store.stages([left.cell]).values() if row.error}
    assert len(errors) == 1
    assert f"fatbench delete {left.cell}; the next run keeps them" in errors.pop()


def test_a_personal_model_meets_the_one_of_the_same_client(place):
    problem = Problem(torch.nn.Identity(), *[torch.empty(0)] * 2, [], 2, 0, torch.device("cpu"))
    there = transfer.TrainedModel("b", 1, "model", None)

    def pairs(here: dict[int, str], theirs: dict[int, str]) -> list[tuple[int, str, str]]:
        found = transfer.pairs(TransferOrigin("B", "b"), there, here, (problem, theirs))
        return [(pair.client, pair.judged, pair.origin[1]) for pair in found]

    assert pairs({-1: "a"}, {-1: "x"}) == [(-1, "a", "x")]
    assert pairs({0: "a", 1: "b"}, {-1: "x"}) == [(0, "a", "x"), (1, "b", "x")]
    assert pairs({-1: "a"}, {0: "x", 2: "z"}) == [(0, "a", "x"), (2, "a", "z")]
    assert pairs({0: "a", 1: "b"}, {1: "y", 2: "z"}) == [(1, "b", "y")]
    with pytest.raises(SpecError, match="no client has a model both here and in cell b"):
        pairs({0: "a"}, {1: "y"})


def test_a_preset_takes_a_transfer_out_and_labels_say_whose_models_are_attacked(place):
    more = "  smoke: {evaluate: {transfer: {among: null, moved: {labels: [Both]}}, limit: {moved: 2}}}\n"
    (place / "moved.yaml").write_text(SUITE.replace("presets: {paper: {}}\n", f"presets:\n  paper: {{}}\n{more}"))
    suite = files.load("moved.yaml")
    found = [one for one in suite.plan("smoke").cells[0].evaluations if one.origin is not None]
    assert [(one.label, one.n, one.origin.cell) for one in found] == [("moved_both", 2, suite.plan().cells[2].id)]
