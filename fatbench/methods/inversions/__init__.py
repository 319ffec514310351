"""Inversions: attacks that rebuild training images from what a client uploaded.

    reconstructions = INVERSIONS["patch_ls"](observed, model, (3, 224, 224), generator)

`observed` is a list of `Observation` (`upload.py`), one for each observed round of the same V target clients:
the weights that were sent to them, their V gradients after the defence, the masks where these are on the wire, labels.
`model` is the architecture, in any state of its weights (they come from `observed`), `shape` (C, H, W) that of the
images as the model takes them. The result is (V, P, C, H, W) in [0, 1]: one reconstruction for each upload (P = 1), or
as many as it has examples (april_opt), or several guesses (oracle). Nothing here sees an original;
`fatbench.methods.inversions.image_measures` compares.

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

import re
from collections.abc import Callable

from torch import Tensor

from fatbench.methods.inversions.april import april
from fatbench.methods.inversions.april_opt import april_opt
from fatbench.methods.inversions.imprint import imprint
from fatbench.methods.inversions.masked import masked
from fatbench.methods.inversions.matching import matching
from fatbench.methods.inversions.oracle import oracle
from fatbench.methods.inversions.patch_ls import patch_ls
from fatbench.methods.inversions.patch_span import patch_span
from fatbench.methods.inversions.simulated import simulated

INVERSIONS: dict[str, Callable[..., Tensor]] = {
    "april": april,
    "april_opt": april_opt,
    "matching": matching,
    "patch_ls": patch_ls,
    "patch_span": patch_span,
    "masked": masked,
    "oracle": oracle,
    "imprint": imprint,
    "simulated": simulated,
}


def reads_of(inversion: Callable[..., Tensor]) -> tuple[str, ...] | None:
    """The ends of the names of the gradients that an inversion reads, from the line `Reads:` of its docstring.

    None: it has no such line and is given all of them.
    """
    doc = getattr(inversion, "func", inversion).__doc__ or ""
    line = re.search(r"^\s*Reads: (.+)$", doc, re.MULTILINE)
    return tuple(line[1].replace(",", " ").split()) if line else None
