"""What a paper brings, and what a plug-in may bring: one function, and one line in the table that closes its module.

    algorithms              one file for each algorithm box of a paper
    aggregators             from a round's updates to their weights in the next model
    robust_aggregators      aggregators for cohorts with malicious clients
    filtering_aggregators   those that leave out the uploads that spread most
    preaggregators          what is done to uploads before an aggregator sees them
    adfl                    AdFL's aggregator
    objectives              what a client minimises; proximal terms
    partitions              which client holds which examples
    augmentations           what training does to a batch of images
    evasion                 attacks from images to adversarial images
    corruptions             common corruptions, as attacks that need no model
    packages                attacks of other packages
    adversaries             what malicious clients do
    knowing_adversaries     those that know the aggregator or aim at robustness
    feature_adversaries     what malicious clients do to the features that they send
    manipulations           what a malicious server does to the model that it sends
    inversions              attacks that rebuild training images from uploads
    defences                what a client does to its gradient before it is sent
    accountants             the differential privacy that noise buys
    threat_models           threat models of the attacks on privacy
    diagnostics             further measurements of a round's models
    exposure                the images that a server names from what it receives
    membership              was an image trained on? With an exact rate of false positives
    intervals               Wilson's, Clopper and Pearson's, Student's
    svcca                   how similar two networks' features are

A method may call the engine: an algorithm trains a cohort, an aggregator may run models. It imports neither the store
nor a runner nor the command line, and prints nothing.
"""
