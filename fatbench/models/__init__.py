"""Models: functions from an image shape and a number of classes to a network.

    MODELS["nin"]((3, 32, 32), 10, width=192)      -> nn.Module, (B, 3, 32, 32) in [0, 1] to logits (B, 10)

Normalisation, where a model has any, is inside it: attacks work in [0, 1]. Weights are drawn from torch's global
generator, which the engine seeds. The lines `Parameters:` of a docstring add up to the number of trainable parameters
in terms of the settings and of `channels`, `size` (the side of the image) and `classes`; `fatbench plan` reads them
without importing torch. A vision transformer is a backbone and a head, put together in `transformer.Transformer`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fatbench.models.edge import edge_resnet, edge_resnet8, edge_vit, whole_edge, whole_resnet, whole_vit
from fatbench.models.efficientnet import efficientnet_lite0
from fatbench.models.leaf_cnn import leaf_cnn
from fatbench.models.mcmahan_cnn import mcmahan_cnn
from fatbench.models.mlp import mlp
from fatbench.models.nin import nin
from fatbench.models.resnet import resnet18
from fatbench.models.small_cnn import small_cnn
from fatbench.models.t2t import t2t
from fatbench.models.tnt import tnt
from fatbench.models.vit import vit


def logit_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of the layers that emit the logits, in the order of the model's parameters.

    The modules named in the model's `logit_layers` where it has that attribute (a head with two classifiers has two);
    else the last module that has parameters itself.
    """
    if hasattr(model, "logit_layers"):
        prefixes = tuple(f"{layer}." for layer in model.logit_layers)  # type: ignore[union-attr]
        return [name for name, _ in model.named_parameters() if name.startswith(prefixes)]
    names: list[str] = []
    for prefix, module in model.named_modules():
        own = [f"{prefix}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)]
        names = own or names
    return names


MODELS: dict[str, Callable[..., nn.Module]] = {
    "nin": nin,
    "small_cnn": small_cnn,
    "resnet18": resnet18,
    "efficientnet_lite0": efficientnet_lite0,
    "leaf_cnn": leaf_cnn,
    "mcmahan_cnn": mcmahan_cnn,
    "mlp": mlp,
    "vit": vit,
    "tnt": tnt,
    "t2t": t2t,
    "edge_vit": edge_vit,
    "whole_vit": whole_vit,
    "edge_resnet": edge_resnet,
    "edge_resnet8": edge_resnet8,
    "whole_edge": whole_edge,
    "whole_resnet": whole_resnet,
}
