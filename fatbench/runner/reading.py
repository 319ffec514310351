"""Write to a stage's run what its plug-ins read beside their own code, see `fatbench.suite.plugin_reads`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from fatbench.store.stages import Store
from fatbench.suite.plugin_reads import recorded


class Reader:
    """Writes to a stage's run what its plug-ins have read, whenever there is something new."""

    def __init__(self, store: Store, run: int, cell: str, stage: str, files: Iterable[Path]) -> None:
        self.store, self.run, self.files = store, run, sorted(files)
        self.earlier: dict[str, str] = {}  # what earlier runs of this stage have read
        for earlier_run in store.runs([cell]) if self.files else ():
            if earlier_run["stage"] == stage and earlier_run["id"] != run and not earlier_run.get("dropped"):
                self.earlier |= earlier_run.get("read") or {}
        self.told: dict[str, str] = {}
        recorded(self.files)  # so that modules are recorded as they are now, before the work

    def tell(self) -> None:
        """Write the digests to the run's provenance. Raises the errors of `Store.describe_run`."""
        digests = {**self.earlier, **recorded(self.files)}
        if digests != self.told:
            self.store.describe_run(self.run, {"read": digests})
            self.told = digests
