"""Training and evaluation of one cell: local training, mixing, rounds, measurements, randomness, devices.

    rounds        the plain data that passes between all parts: Problem, State, Update, Round
    setup         reads the data, deals it to clients and builds the model: a cell ready to run
    splits        which images train on which client, and which are held out
    experiment    runs the algorithm's rounds and measures each of them
    cohort        which clients take part in a round; the only way to train them
    local         local training: what a client does with theta^t
    optimizers    SGD, Adam and AdamW as pure functions
    mixing        from updates to the next global model
    malicious     where malicious clients enter a round
    own_uploads   aggregates the uploads of a training loop outside the engine
    inject        passes a function the arguments that its parameters name
    measures      the metrics of a round
    accuracy      natural and adversarial accuracy, image by image
    outcomes      checks on the outcome of each image: its class, its perturbation
    plausible     checks on models that were trained elsewhere
    answers       a network's fingerprint: its logits for a few fixed images
    gradients     the gradient of a loss with respect to the images
    randomness    named, seeded random streams
    graphs        training steps recorded as CUDA graphs
    precision     bfloat16 and TF32
    memory        the allocator's settings, and recognising out-of-memory errors
    microbatch    a batch in parts, so that its activations fit into memory
    mapped        images on the device, or memory-mapped from a file
    filed         uploads of large networks, kept in a file
    footprint     what training costs a client's device
    counters      counts floating-point operations while code runs

The engine imports no aggregator, attack, objective or algorithm: it is handed what it runs. It knows nothing of
databases, results files, tables or the command line.
"""
