"""From a plan to finished cells: mistakes are found first, then workers do what is not done.

    start                 `fatbench run`: checks, then hands jobs to an executor
    run_options           the options of a run
    jobs                  what passes between a run and its workers
    executors             where workers run: this machine, Ray, SLURM
    processes             worker processes on this machine
    slots                 how many cells share a GPU
    worker                one cell: its training, then its evaluations
    stage                 one stage: claim, lease, failure
    training              the training stage
    attacking             the evaluation stages
    transfer              attacks computed on other cells' models
    heartbeat             renews the lease while a stage runs
    oom_retry             retries with smaller parts when memory runs out
    checkpoints           states and models on disk
    provenance            the commit, versions and machine that produce a number
    versions              which results were produced by inputs that have changed since
    own_network           a plug-in's network and the code that trained it
    progress              how many stages of the cells are done
    waiting               waits for cells that other processes hold; signals that ask for an end
    live_log              TensorBoard, Weights & Biases and MLflow
    cell_labels           stores the names that a suite gives to its cells
    choosing              what each row chooses after its trials
    unfinished            half-done cells between machines
    offers                how long runs take, and what a machine finishes
    calibrate             measures the speed of this machine
    gpu_estimates         estimates the speed of a GPU that is not here
    learning_check        trains the first cell of a plan for a moment
    evaluate_checkpoint   attacks one saved model, outside any suite
    evaluate_external     attacks models that were trained elsewhere
    invert                attacks one update for its training images
    zoo                   finds the networks of stored results by name

Torch is imported inside a worker only. No arithmetic of a method is here, and no text for a terminal.
"""
