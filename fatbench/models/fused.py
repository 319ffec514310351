"""timm's TNT attention through fused kernels, as timm's ViT has it: the same function of the same parameters."""

from __future__ import annotations

from timm.models.tnt import TNT, Attention
from torch import Tensor
from torch.nn import functional as F


class FusedAttention(Attention):
    """timm's `Attention` of TNT without dropout, the (B, heads, N, N) table never in memory where a kernel is fused."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        b, n, _ = x.shape
        q, k = self.qk(x).reshape(b, n, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).reshape(b, n, self.num_heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        mixed: Tensor = self.proj(y.transpose(1, 2).reshape(b, n, -1))
        return mixed


def fuse(backbone: TNT) -> TNT:
    """The backbone itself, its attentions fused. Their class is exchanged, so that names and initial weights stay."""
    for module in backbone.modules():
        if type(module) is Attention:
            module.__class__ = FusedAttention
    return backbone
