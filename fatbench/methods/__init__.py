"""What a paper brings, and exactly what a plug-in may bring: one function, one line in the closing table of its module.

    aggregators (adfl)     from a round's updates to weights          attacks           from images to adversarial
    images
    objectives       what a client minimises; proximal terms    partitions        who holds which examples
    defences         what a client does to its gradient         augmentations     what training does to a batch
    diagnostics (svcca)   what else is measured of a round           algorithms/        one algorithm box of a paper a
    file inversions/      attacks that rebuild training images

A method may call the engine: an algorithm trains a cohort, an aggregator may run models. Not here: how a cell runs,
where numbers are kept, anything that prints. No method imports the store, a runner or the command line.
"""
