"""The end of `fatbench run NAME --tune`: from the trials in the database to a file of choices."""

from __future__ import annotations

import io
from pathlib import Path

from ruamel.yaml import YAML

from fatbench import whole_file
from fatbench.errors import SpecError
from fatbench.runner import progress
from fatbench.store.stages import Store
from fatbench.suite import tuning
from fatbench.suite.files import Suite

DIVERGED = "Diverged: "  # the last line of the traceback of a trial whose training diverged
HEAD = "# What each row of {suite}, preset {preset}, tried and chose; the accuracies are of validation images.\n"


def write_choices(suite: Suite, preset: str, store: Store) -> Path:
    """Write the choices of a preset, all of whose trials are done. Returns the file. SpecError: some are not."""
    tune, plan = suite.contents.tune, suite.trials().plan(preset, refuse=False)
    assert tune is not None
    rows = progress.cells_of(plan, store)
    diverged = {row.cell.id for row in rows if row.status == "failed" and DIVERGED in row.error}
    left = sum(row.status != "done" and row.cell.id not in diverged for row in rows)
    if left:
        raise SpecError(f"{left} of {len(rows)} trials are not done: nothing is chosen yet")
    metric = tuning.metric(tune)
    measured = store.measurements([row.cell.id for row in rows], stages=["train"], metrics=[metric])
    accuracies = {one["cell"]: one["value"] for one in measured}  # in the order of rounds: the last holds
    found = tuning.choices(tune, plan.cells, {**accuracies, **dict.fromkeys(diverged, 0.0)})
    content = {"tune": tune.model_dump(mode="json"), "trials": tuning.trials_digest(plan.cells), "rows": found}
    text, yaml = io.StringIO(), YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 1000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(content, text)
    file = tuning.tuned_file(suite.name, preset, suite.file.parent)
    whole_file.write(file, HEAD.format(suite=suite.name, preset=preset) + text.getvalue(), file)
    return file
