"""Building blocks that backbone and action head share.

N: batch, S: tokens, D: dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    """Bidirectional multi-head self-attention, (N, S, D) to (N, S, D)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, tokens: Tensor) -> Tensor:
        n, s, d = tokens.shape
        qkv = self.qkv(tokens).view(n, s, 3, self.heads, d // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0
        )
        return self.out(mixed.transpose(1, 2).reshape(n, s, d))


class Mlp(nn.Module):
    """Two linear layers with a GELU between, (N, S, D) to (N, S, D)."""

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.drop(F.gelu(self.up(tokens))))
