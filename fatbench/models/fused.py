"""timm's TNT attention with fused kernels, as in timm's ViT: the same function of the same parameters."""

from __future__ import annotations

from timm.models.tnt import TNT, Attention
from torch import Tensor
from torch.nn import functional as F


class FusedAttention(Attention):
    """timm's `Attention` of TNT without dropout; a fused kernel never stores the (B, heads, N, N) matrix."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        b, n, _ = x.shape
        q, k = self.qk(x).reshape(b, n, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).reshape(b, n, self.num_heads, -1).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        mixed: Tensor = self.proj(y.transpose(1, 2).reshape(b, n, -1))
        return mixed


def fuse(backbone: TNT) -> TNT:
    """Fuse the backbone's attentions in place, by changing their class: names and initial weights stay."""
    for module in backbone.modules():
        if type(module) is Attention:  # a subclass may compute something else
            module.__class__ = FusedAttention
    return backbone
