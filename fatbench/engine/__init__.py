"""A cell from state to state: local training, mixing, rounds, what is measured, randomness, devices.

    rounds      the plain data that passes between all parts          local, optimizers   what a client does
    cohort      the one door to the training of a round's clients     mixing              from updates to the next model
    asks        a function is given what its parameters name          experiment, measures  a cell, and its numbers
    accuracy    natural and under attack, image by image              gradients           of a loss by the images
    randomness  named, seeded streams                                 splits              who holds which examples
    memory, microbatch, precision, footprint                          a device: its memory, its arithmetic, its cost

Not here: a name of any method. The engine imports no aggregator, attack, objective or algorithm; what it runs, it is
handed. It does not know of databases, files of results, tables or the command line either.
"""
