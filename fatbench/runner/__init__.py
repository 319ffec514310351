"""From a plan to finished cells: what can be wrong is found first, then workers do what is not done.

    start         `fatbench run`: checks data, asks the store what is left, hands jobs to an executor
    processes     workers as processes, one of them begun early
    worker        one cell, stage by stage: train, then every evaluation
    checkpoints   states and models on disk, written whole, known by their digests
    provenance    what produced a number: commit, versions, device
    progress      how far the cells of a suite are              evaluate      a saved model, outside any suite
    executors/    who works: this machine, Ray, SLURM

Not here: arithmetic of a method, text for a terminal. Torch is imported inside a worker only.
"""
