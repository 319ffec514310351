"""The fast path: many clients trained as one program, for devices where launching kernels is the cost.

    clients     the clients of a cohort: their weights one above the other, (K, ...); by vmap for any network
    channels    the same for convolutional networks: clients side by side in the channels
    cells       the clients of many cells, which meet where their cohorts are trained
    draws       random draws and losses of a batch that holds several clients

All of it equals `fatbench.engine.local`, client by client, to rounding. `fatbench.engine.cohort` is the door.
"""
