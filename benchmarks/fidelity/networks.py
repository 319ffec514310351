"""Networks: So-ViT's CLS+VIS head, T2T-ViT and TNT, beside ours."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fidelity.measure import Row, network
from benchmarks.fidelity.sources import imported
from fatbench.models import heads
from fatbench.models.t2t import t2t
from fatbench.models.tnt import tnt

CLASSES = 10
BRANCHES = {  # So-ViT's classifier -> ours
    "representation.conv_dr_block.0.0.weight": "branch1.weight",
    "representation.conv_dr_block.1.0.weight": "branch2.weight",
    "representation.conv_dr_block.0.1.": "norm1.",
    "representation.conv_dr_block.1.1.": "norm2.",
    "normalization.weight": "start",
}
TNT_NAMES = {  # Huawei's -> timm's
    "patch_embed.": "pixel_embed.", "outer_pos": "patch_pos", "inner_pos": "pixel_pos",
    "proj_norm1": "norm1_proj", "proj_norm2": "norm2_proj", "inner_norm1": "norm_in", "inner_attn": "attn_in",
    "inner_norm2": "norm_mlp_in", "inner_mlp": "mlp_in", "outer_norm1": "norm_out", "outer_attn": "attn_out",
    "outer_norm2": "norm_mlp", "outer_mlp": "mlp",
}  # fmt: skip


def so_vit(folder: Path) -> list[Row]:
    """The CLS+VIS head at the two widths that So-ViT has and the paper uses, and our small start beside it."""
    rows: list[Row] = []
    tokens = torch.randn(8, 50, 384, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(8) % CLASSES
    with imported(folder, "src.so_vit", stubs=_OLD_TIMM) as (module,):
        settings = copy.deepcopy(module.representationConfig)
        settings["normalization"]["args"]["input_dim"] = settings["args"]["dimension_reduction"]
        for start in ("kaiming", "timm"):

            def theirs() -> nn.Module:
                made: nn.Module = module.Classifier(CLASSES, 384, copy.deepcopy(settings))
                made.apply(lambda m: module.So_ViT._init_weights(made, m))  # So_ViT applies it to all its layers
                return made

            def ours(start: str = start) -> nn.Module:
                return heads.build("cls_vis", 384, CLASSES, d1=None, d2=None, norm="bn", start=start)

            what = f"heads.ClsVisHead, head_start: {start}"
            named = f"so-vit.head{'' if start == 'kaiming' else '.small'}"
            made = network(named, "Classifier and its start", what, theirs, ours, _head_names, tokens, labels)
            rows += made if start == "kaiming" else _meant(made, "differences: cls-vis-head")
    return rows


def _head_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        for theirs, ours in BRANCHES.items():
            name = name.replace(theirs, ours)
        found[name] = value.flatten(1) if name.startswith("branch") else value
    return found


def t2t_vit(folder: Path) -> list[Row]:
    """T2T-ViT-14's width at depth 2, without the performers' dropout, which the paper does not have."""
    images = torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(4)
    with imported(folder, "models.t2t_vit", stubs=_OLD_TIMM) as (module,):

        def theirs() -> nn.Module:
            model: nn.Module = module.T2T_ViT(
                tokens_type="performer", embed_dim=384, depth=2, num_heads=6, mlp_ratio=3.0, num_classes=CLASSES
            )
            for layer in model.modules():
                if isinstance(layer, nn.Dropout):
                    layer.p = 0.0
            return model

        def ours() -> nn.Module:
            return _Plain(t2t((3, 224, 224), CLASSES, depth=2, normalise="none"))

        return network("t2t", "t2t_vit.T2T_ViT", "t2t, depth 2", theirs, ours, dict, images, labels)


class _Plain(nn.Module):
    """A Transformer of ours under the names of a network with a classifier called `head`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        for name, module in model.backbone.named_children():
            self.add_module(name, module)
        for name, value in list(model.backbone.named_parameters(recurse=False)):
            self.register_parameter(name, value)
        self.head = model.head.fc
        self._whole = [model]

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self._whole[0](x)
        return logits


def tnt_s(folder: Path) -> list[Row]:
    """TNT-S's widths at depth 2 beside `tnt`: the authors' network is what timm has had since May 2025."""
    images, labels = torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    with imported(folder / "tnt_pytorch", "tnt", stubs=_OLD_TIMM) as (module,):

        def theirs() -> nn.Module:
            model: nn.Module = module.TNT(
                patch_size=16, outer_dim=384, inner_dim=24, depth=2, outer_num_heads=6, inner_num_heads=4,
                qkv_bias=False, num_classes=CLASSES,
            )  # fmt: skip
            return model

        def ours() -> nn.Module:
            return _Plain(tnt((3, 224, 224), CLASSES, depth=2, legacy=False, normalise="none"))

        return network("tnt", "tnt.TNT", "tnt, depth 2", theirs, ours, _tnt_names, images, labels)


def _tnt_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        if name != "outer_tokens":  # zeros that are never trained
            for theirs, ours in TNT_NAMES.items():
                name = name.replace(theirs, ours)
            found[name] = value.mT.unflatten(2, (4, 4)) if name == "pixel_pos" else value  # (1, 16, D) there
    return found


def tnt_legacy(folder: Path) -> list[Row]:
    """TNT-S's widths at depth 2 in timm of 2022, beside `tnt` with legacy: true."""
    images, labels = torch.rand(4, 3, 224, 224, generator=torch.Generator().manual_seed(0)), torch.arange(4)
    from timm.layers.mlp import Mlp

    old = {  # one file of timm: the whole of that time does not import on today's Python
        **_OLD_TIMM,
        "timm.models.helpers": {"build_model_with_cfg": None},
        "timm.models.layers": {"Mlp": Mlp, "_assert": torch._assert, **_OLD_TIMM["timm.models.layers"]},
        "timm.models.layers.helpers": {"to_2tuple": _OLD_TIMM["timm.models.layers"]["to_2tuple"]},
        "timm.models.vision_transformer": {"resize_pos_embed": None},
    }
    with imported(folder / "timm" / "models", "tnt", stubs=old) as (module,):

        def theirs() -> nn.Module:
            model: nn.Module = module.TNT(
                patch_size=16, embed_dim=384, in_dim=24, depth=2, num_heads=6, in_num_head=4, qkv_bias=False,
                num_classes=CLASSES,
            )  # fmt: skip
            return model

        def ours() -> nn.Module:
            return _Plain(tnt((3, 224, 224), CLASSES, depth=2, legacy=True, normalise="none"))

        return network("tnt.legacy", "timm 0.6, TNT", "tnt, legacy: true, depth 2", theirs, ours, dict, images, labels)


def _meant(rows: list[Row], note: str) -> Iterator[Row]:
    """Rows of a variant that is there to be different."""
    from dataclasses import replace

    for row in rows:
        yield replace(row, expected=False, note=note)


class _Any:
    """Stands for what old timm had and nothing compared calls."""

    def __init__(self, *_: Any, **__: Any) -> None: ...


def _registered(function: Any) -> Any:
    return function


def _timm() -> dict[str, dict[str, Any]]:
    from timm.layers.drop import DropPath
    from timm.layers.helpers import to_2tuple
    from timm.layers.weight_init import trunc_normal_

    return {
        "timm.models.helpers": {"load_pretrained": None},
        "timm.models.registry": {"register_model": _registered},
        "timm.models.layers": {"trunc_normal_": trunc_normal_, "DropPath": DropPath, "to_2tuple": to_2tuple},
        "timm.models.senet": {"SEModule": _Any},
        "timm.models.inception_resnet_v2": {"BasicConv2d": _Any},
        "timm.models.densenet": {"DenseBlock": _Any, "DenseTransition": _Any},
        "timm.models.resnet": {"resnet26d": None, "resnet50d": None, "Bottleneck": _Any, "BasicBlock": _Any},
    }


_OLD_TIMM: dict[str, dict[str, Any]] = _timm()
