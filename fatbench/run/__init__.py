"""From a plan to finished cells: what can be wrong is found first, then workers take cell after cell.

| module | what |
|---|---|
| start | checks what was asked for, opens the store, hands the cells to an executor |
| executors/ | who works where: processes here, Ray tasks, SLURM jobs |
| worker | one cell's work, stage by stage, so that a killed run goes on and ends with the same bytes |
| checkpoints | states and models as files |
| provenance | what produced a number |
| progress | how far cells are |
| evaluate | attacks on a saved model, outside any suite |

Not here: what is computed (`engine`, `methods`), and what a person sees: `start.run` is handed who watches.
"""
