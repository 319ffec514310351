"""Inversions: attacks that reconstruct training images from what a client uploaded.

    reconstructions = INVERSIONS["patch_ls"](observed, model, (3, 224, 224), generator)

`observed` is a list of `Observation` (`upload.py`), one for each observed round of the same V target clients: the
weights that were sent to them, their V gradients after the defence, the masks if these are sent, and the labels.
`model` is the architecture; its weights do not matter, they come from `observed`. `shape` (C, H, W) is that of the
images as the model takes them. The result is (V, P, C, H, W) in [0, 1]: one reconstruction for each upload (P = 1), or
as many as it has examples (april_opt), or several guesses (oracle). No inversion sees an original; `image_measures`
compares afterwards. `Observation.mode` says how the clients computed, and inversions simulate the same.

    upload            what the server observes; images cut into patches and back
    target_client     what target clients send
    batch_statistics  what the buffers of batch normalisation give away
    labels            the number of images of each class, from the last layer's gradient
    april             APRIL in closed form
    april_opt         APRIL by optimisation
    matching          gradient matching, for any model
    simulated         simulates the client's local steps
    patch_ls          least squares through the patch embedding
    patch_span        the span of the patches alone
    masked            solves with the entries that a defence left
    imprint           reads images out of an imprint block
    oracle            an upper bound: the best solver, picked with the truth
    decoder           from an uploaded feature map to the image
    image_measures    how similar a reconstruction and its original are
    lpips             the perceptual distance LPIPS

| inversion | reads | exact | where it stops |
|---|---|---|---|
| april | positions, first attention | one image, D >= C p p, block 0 without norm and residuals | an ordinary block 0 |
| april_opt | all gradients | never | time |
| matching | all gradients | never, but any model | time |
| simulated | all of an update | never, but several local steps of several images | time; Adam |
| patch_ls | positions, patch embedding | one image, D >= N, any ViT | two images; masks; positions withheld |
| patch_span | patch embedding | up to length, one upsampled image | two images; masks; rounding to 8 bits |
| masked | positions, patch embedding | m rounds at the same weights that leave nothing out | positions withheld |
| imprint | the block that a manipulation puts in front | one image in its bin, any model | bins with several images |
| oracle | as patch_ls or april | - | no attack: every solver, the best picked with the truth |
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fatbench.methods.inversions.april import april
from fatbench.methods.inversions.april_opt import april_opt, eval_mode, every_step
from fatbench.methods.inversions.imprint import imprint, imprint_manipulation
from fatbench.methods.inversions.masked import masked, patches_without_prior, prior_if_any
from fatbench.methods.inversions.matching import every_restart, matching, statistics_that_are_known
from fatbench.methods.inversions.oracle import oracle, patches_if_read, prior_if_read
from fatbench.methods.inversions.patch_ls import patch_ls, patches_of_the_solver, prior_of_the_solver
from fatbench.methods.inversions.patch_span import patch_span, prior_within_the_image
from fatbench.methods.inversions.simulated import (
    at_most_50_steps,
    every_epoch,
    simulated,
    statistics_that_are_sent,
    steps_of_sgd,
)
from fatbench.methods.inversions.upload import learned_positions, too_few_equations
from fatbench.methods.threat_models import of_matching, of_patch_ls, of_simulated
from fatbench.suite.entry import InversionEntry, entry_of

INVERSIONS: dict[str, Callable[..., Tensor]] = {
    "april": InversionEntry(
        april, threat="A", refuse=(learned_positions,), reads=("pos_embed", "blocks.0.attn.qkv.weight")
    ),
    "april_opt": InversionEntry(
        april_opt,
        passes=every_step,
        threat="B",
        labels=True,
        refuse=(learned_positions, eval_mode),
        example={"steps": 2},
    ),
    "matching": InversionEntry(
        matching,
        passes=every_restart,
        threat=of_matching,
        labels=True,
        refuse=(statistics_that_are_known,),
        example={"steps": 2},
    ),
    "patch_ls": InversionEntry(
        patch_ls,
        threat=of_patch_ls,
        refuse=(learned_positions, patches_of_the_solver, prior_of_the_solver),
        reads=("patch_embed.proj.weight", "pos_embed"),
    ),
    "patch_span": InversionEntry(
        patch_span,
        threat="B",
        labels=True,
        refuse=(learned_positions, too_few_equations, prior_within_the_image),
        reads=("patch_embed.proj.weight", "pos_embed"),
        example={"latent": 6, "iterations": 2},
    ),
    "masked": InversionEntry(
        masked,
        threat="B",
        refuse=(learned_positions, patches_without_prior, prior_if_any),
        reads=("patch_embed.proj.weight", "pos_embed"),
        example={"latent": 6, "iterations": 1},
    ),
    "oracle": InversionEntry(
        oracle,
        threat="bound",
        refuse=(learned_positions, patches_if_read, prior_if_read),
        reads=("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"),
        example={"latent": 6},
    ),
    "imprint": InversionEntry(
        imprint, threat="G", refuse=(imprint_manipulation,), reads=("imprint.weight", "imprint.bias")
    ),
    "simulated": InversionEntry(
        simulated,
        passes=every_epoch,
        threat=of_simulated,
        labels=True,
        refuse=(steps_of_sgd, at_most_50_steps, statistics_that_are_sent),
        example={"iterations": 2},
    ),
}


def reads_of(inversion: Callable[..., Tensor]) -> tuple[str, ...] | None:
    """The suffixes of the tensors that an inversion reads; None: it reads all of them."""
    entry = entry_of(inversion)
    return entry.gradients or None if isinstance(entry, InversionEntry) else None
