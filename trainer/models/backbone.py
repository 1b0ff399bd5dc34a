"""What is seen, asked and felt, condensed into one vector: the cognition feature.

Image patches, the instruction's words, the state and, at the end, one learned token attend to each
other; what comes out at the learned token conditions the action head.

B: samples, D: width, W: words of an instruction.
"""

from __future__ import annotations

import hashlib
import re

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.layers import Attention, Mlp

#: Image pixels along the side of one token: the product of the stem's strides.
PATCH = 16
_WORD = re.compile(r"[^\W_]+")


def hash_words(text: str, vocabulary: int, max_words: int) -> list[int]:
    """The first `max_words` words of `text` as numbers in [1, vocabulary), padded with 0.

    A word's number is a hash of its lower-case letters, so it needs no word list and is the same
    for every data set.
    """
    words = _WORD.findall(text.lower())[:max_words]
    digests = (hashlib.blake2b(word.encode(), digest_size=8).digest() for word in words)
    numbers = [1 + int.from_bytes(digest, "little") % (vocabulary - 1) for digest in digests]
    return numbers + [0] * (max_words - len(numbers))


class VisionStem(nn.Module):
    """(B, 3, H, W) pixels to (B, ceil(H/16) x ceil(W/16), D) tokens."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, dim // 3, kernel_size=7, stride=4, padding=3)
        self.conv2 = nn.Conv2d(dim // 3, 2 * dim // 3, kernel_size=3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(2 * dim // 3, dim, kernel_size=3, stride=2, padding=1)

    def forward(self, pixels: Tensor) -> Tensor:
        features = F.gelu(self.conv1(pixels))
        features = F.gelu(self.conv2(features))
        return self.conv3(features).flatten(2).transpose(1, 2)


class BackboneBlock(nn.Module):
    """A pre-norm transformer block, (B, S, D) to (B, S, D)."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.norm1(tokens))
        return tokens + self.mlp(self.norm2(tokens))


class Backbone(nn.Module):
    """Image, words and state to the cognition feature.

    Args:
        height, width: of the images, in pixels.
        state_dim: of the state vector.
        dim, layers, heads, dropout: of the transformer.
        vocabulary, max_words: of the instruction's hashed words.
    """

    def __init__(
        self,
        *,
        height: int,
        width: int,
        state_dim: int,
        dim: int,
        layers: int,
        heads: int,
        dropout: float,
        vocabulary: int,
        max_words: int,
    ) -> None:
        super().__init__()
        patches = -(-height // PATCH) * -(-width // PATCH)
        self.stem = VisionStem(dim)
        self.patch_position = nn.Parameter(torch.empty(patches, dim))
        # Without values of its own: to draw them on the meta device would load torch's compiler.
        self.word_embedding = nn.Embedding.from_pretrained(
            torch.empty(vocabulary, dim), freeze=False
        )
        self.word_position = nn.Parameter(torch.empty(max_words, dim))
        self.state = nn.Linear(state_dim, dim)
        self.cognition_token = nn.Parameter(torch.empty(1, dim))
        self.blocks = nn.ModuleList(BackboneBlock(dim, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, image: Tensor, words: Tensor, state: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, (B, W) int64 and (B, state_dim) to (B, D)."""
        dtype = self.state.weight.dtype
        pixels = image.to(dtype) / 127.5 - 1.0
        tokens = torch.cat(
            [
                self.stem(pixels) + self.patch_position,
                self.word_embedding(words) + self.word_position,
                self.state(state.to(dtype)).unsqueeze(1),
                self.cognition_token.expand(len(image), 1, -1),
            ],
            dim=1,
        )
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens[:, -1])
