"""Models: functions from an image shape and a number of classes to a network.

    MODELS["nin"]((3, 32, 32), 10, width=192)      -> nn.Module, (B, 3, 32, 32) in [0, 1] to logits (B, 10)

    linear             a linear network, and one that ignores its input: lower bounds
    mlp                one hidden layer
    mcmahan_cnn        the MNIST network of McMahan et al.
    leaf_cnn           LEAF's network for CelebA
    small_cnn          SFAT's network for SVHN
    nin                Network in Network, SFAT's for CIFAR-10
    resnet             ResNet-18 for small images
    efficientnet       EfficientNet-Lite0
    vit                Vision Transformer
    t2t                Tokens-to-Token ViT
    tnt                Transformer in Transformer
    lora               changes of low rank beside frozen weights
    transformer        what the vision transformers share
    heads              from a transformer's tokens to logits
    fused              fused attention kernels for TNT
    edge               networks that are split between an edge device and a server
    dropout            dropout whose mask does not depend on the memory layout
    dual_norm          batch normalisation with separate statistics for adversarial images
    pretrained         loads published weights into a backbone
    external_network   networks that were trained elsewhere
    torch_files        reads what torch.save wrote, and builds nothing but tensors and plain values
    own_modules        imports a user's Python file in isolation
    shapes             checks of image sizes and batch sizes

Normalisation, if a model has any, is inside it: attacks work in [0, 1]. Weights are drawn from torch's global
generator, which the engine seeds. A vision transformer is a backbone and a head, joined in `transformer.Transformer`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from fatbench.models.edge import (
    edge_resnet,
    edge_resnet8,
    edge_resnet8_parameters,
    edge_resnet_parameters,
    edge_vit,
    edge_vit_parameters,
    features_tiled,
    resnet8_edge,
    shallow_edge,
    trained_by_edges,
    whole_edge,
    whole_edge_parameters,
    whole_resnet,
    whole_resnet_parameters,
    whole_vit,
    whole_vit_parameters,
)
from fatbench.models.efficientnet import efficientnet_lite0, efficientnet_lite0_parameters
from fatbench.models.leaf_cnn import leaf_cnn, leaf_cnn_parameters
from fatbench.models.linear import constant, constant_parameters, linear, linear_parameters
from fatbench.models.mcmahan_cnn import mcmahan_cnn, mcmahan_cnn_parameters
from fatbench.models.mlp import mlp, mlp_parameters
from fatbench.models.nin import nin, nin_parameters
from fatbench.models.resnet import resnet18, resnet18_parameters
from fatbench.models.shapes import (
    at_least_2,
    at_least_4,
    at_least_8,
    equal_heads,
    no_batch_of_one_at_8,
    no_batch_of_one_at_32,
    tiled,
)
from fatbench.models.small_cnn import small_cnn, small_cnn_parameters
from fatbench.models.t2t import t2t, t2t_parameters
from fatbench.models.tnt import tnt, tnt_parameters
from fatbench.models.vit import vit, vit_parameters
from fatbench.suite.entry import ModelEntry


def logit_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of the layers that emit the logits, in the order of the model's parameters.

    These are the modules in the model's attribute `logit_layers`, if it has one (a head with two classifiers names
    two), else the last module with parameters of its own.
    """
    if hasattr(model, "logit_layers"):
        prefixes = tuple(f"{layer}." for layer in model.logit_layers)  # type: ignore[union-attr]
        return [name for name, _ in model.named_parameters() if name.startswith(prefixes)]
    names: list[str] = []
    for prefix, module in model.named_modules():
        layer_names = [f"{prefix}.{name}".removeprefix(".") for name, _ in module.named_parameters(recurse=False)]
        names = layer_names or names
    return names


MODELS: dict[str, Callable[..., nn.Module]] = {
    "nin": ModelEntry(
        nin, parameters=nin_parameters, refuse=(at_least_4,), parts=("dropout",), cites=("lin2014", "zhu2023")
    ),
    "small_cnn": ModelEntry(
        small_cnn,
        parameters=small_cnn_parameters,
        refuse=(at_least_8,),
        parts=("batch normalisation",),
        cites=("zhu2023",),
    ),
    "resnet18": ModelEntry(
        resnet18,
        parameters=resnet18_parameters,
        refuse=(at_least_8, no_batch_of_one_at_8),
        parts=("batch normalisation",),
        cites=("he2016", "zhu2023"),
    ),
    "efficientnet_lite0": ModelEntry(
        efficientnet_lite0,
        parameters=efficientnet_lite0_parameters,
        refuse=(at_least_8, no_batch_of_one_at_32),
        parts=("batch normalisation",),
        cites=("tan2019",),
    ),
    "leaf_cnn": ModelEntry(
        leaf_cnn,
        parameters=leaf_cnn_parameters,
        refuse=(at_least_2, no_batch_of_one_at_8),
        parts=("batch normalisation",),
        cites=("caldas2018", "zhu2023"),
    ),
    "mcmahan_cnn": ModelEntry(
        mcmahan_cnn, parameters=mcmahan_cnn_parameters, refuse=(at_least_4,), cites=("danilenka2022", "mcmahan2017")
    ),
    "mlp": ModelEntry(mlp, parameters=mlp_parameters, cites=("zhu2023",)),
    "linear": ModelEntry(linear, parameters=linear_parameters, parts=("linear",)),
    "constant": ModelEntry(constant, parameters=constant_parameters, parts=("linear",)),
    "vit": ModelEntry(
        vit,
        parameters=vit_parameters,
        refuse=(tiled, equal_heads),
        parts=("patches",),
        cites=("aldahdooh2022", "dosovitskiy2021", "hu2022"),
    ),
    "tnt": ModelEntry(tnt, parameters=tnt_parameters, refuse=(tiled, equal_heads), cites=("aldahdooh2022", "han2021")),
    "t2t": ModelEntry(
        t2t,
        parameters=t2t_parameters,
        refuse=(tiled, equal_heads),
        cites=("aldahdooh2022", "choromanski2021", "yuan2021"),
    ),
    "edge_vit": ModelEntry(
        edge_vit,
        parameters=edge_vit_parameters,
        edge=shallow_edge,
        refuse=(features_tiled, equal_heads, trained_by_edges),
        parts=("edge", "server", "distillation head", "batch normalisation"),
        cites=("tao2022", "touvron2021", "xiao2021"),
    ),
    "whole_vit": ModelEntry(
        whole_vit,
        parameters=whole_vit_parameters,
        refuse=(features_tiled, equal_heads),
        parts=("batch normalisation",),
        cites=("tao2022",),
    ),
    "edge_resnet": ModelEntry(
        edge_resnet,
        parameters=edge_resnet_parameters,
        edge=shallow_edge,
        refuse=(trained_by_edges,),
        parts=("edge", "server", "batch normalisation"),
        cites=("he2020", "tao2022"),
    ),
    "edge_resnet8": ModelEntry(
        edge_resnet8,
        parameters=edge_resnet8_parameters,
        edge=resnet8_edge,
        refuse=(trained_by_edges,),
        parts=("edge", "server", "batch normalisation"),
        cites=("he2020", "tao2022"),
    ),
    "whole_edge": ModelEntry(
        whole_edge, parameters=whole_edge_parameters, parts=("batch normalisation",), cites=("tao2022",)
    ),
    "whole_resnet": ModelEntry(
        whole_resnet, parameters=whole_resnet_parameters, parts=("batch normalisation",), cites=("tao2022",)
    ),
}
