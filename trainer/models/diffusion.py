"""The action head: a diffusion transformer that turns noise into an action chunk.

Noise schedule: the cosine one of Nichol and Dhariwal (2021), https://arxiv.org/abs/2102.09672;
blocks: adaLN-zero of Peebles and Xie (2023), https://arxiv.org/abs/2212.09748; sampling: DDIM with
eta 0 of Song et al. (2021), https://arxiv.org/abs/2010.02502.

N: chunks in a batch, R: repeats of a sample, T: steps of a chunk, A: action dimensions, D: width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.components import Sample
from trainer.data.keyed import SampleRandom
from trainer.models.layers import Attention, Mlp

_MAX_BETA = 0.999
_COSINE_OFFSET = 0.008
_TIMESTEP_PERIOD = 10_000.0


def signal_levels(steps: int) -> np.ndarray:
    """(steps,) float64: the action's share of a noisy action's variance at each timestep."""
    edges = np.arange(steps + 1) / steps
    curve = np.cos((edges + _COSINE_OFFSET) / (1 + _COSINE_OFFSET) * np.pi / 2) ** 2
    betas = np.minimum(1 - curve[1:] / curve[:-1], _MAX_BETA)
    return np.cumprod(1 - betas)


def sampling_timesteps(diffusion_steps: int, sampling_steps: int) -> list[int]:
    """Where DDIM evaluates the model, noisiest first, ending at 0: 90, 80, ..., 0 of 100 in 10.

    The noisiest timesteps are left out: their signal is so weak that the first estimate of the
    action would be error alone.
    """
    stride = diffusion_steps // sampling_steps
    return [stride * step for step in reversed(range(sampling_steps))]


@dataclass(frozen=True)
class DiffusionDraws:
    """Adds to a sample what its training needs at random, all of it from the sample's own streams.

    noise (R, T, A) float32, timestep (R,) int64, drop_condition (R,) bool.
    """

    repeats: int
    diffusion_steps: int
    condition_dropout: float

    def __call__(self, sample: Sample, rng: SampleRandom) -> Sample:
        repeats = range(self.repeats)
        shape = sample["action"].shape
        noise = [
            rng.generator("noise", r).standard_normal(shape, dtype=np.float32) for r in repeats
        ]
        timestep = [rng.generator("timestep", r).integers(self.diffusion_steps) for r in repeats]
        dropped = [rng.generator("condition", r).random() < self.condition_dropout for r in repeats]
        return {
            **sample,
            "noise": np.stack(noise),
            "timestep": np.array(timestep, dtype=np.int64),
            "drop_condition": np.array(dropped, dtype=np.bool_),
        }


class HeadBlock(nn.Module):
    """A transformer block whose norms and residuals the condition scales, shifts and gates."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = Mlp(width, dropout)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, tokens: Tensor, condition: Tensor) -> Tensor:
        """(N, T, D) and (N, D) to (N, T, D)."""
        shift1, scale1, gate1, shift2, scale2, gate2 = (
            self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        )
        tokens = tokens + gate1 * self.attention(self.norm1(tokens) * (1 + scale1) + shift1)
        return tokens + gate2 * self.mlp(self.norm2(tokens) * (1 + scale2) + shift2)


class DiffusionHead(nn.Module):
    """Predicts the noise in a noisy action chunk, given its timestep and a condition."""

    signal: Tensor
    frequencies: Tensor

    def __init__(
        self,
        *,
        chunk: int,
        action_dim: int,
        condition_dim: int,
        width: int,
        layers: int,
        heads: int,
        dropout: float,
        diffusion_steps: int,
        sampling_steps: int,
    ) -> None:
        super().__init__()
        self._sampling_timesteps = sampling_timesteps(diffusion_steps, sampling_steps)
        self.action = nn.Linear(action_dim, width)
        self.step_position = nn.Parameter(torch.empty(chunk, width))
        self.timestep1 = nn.Linear(width, width)
        self.timestep2 = nn.Linear(width, width)
        self.cognition = nn.Linear(condition_dim, width)
        self.null_condition = nn.Parameter(torch.empty(1, condition_dim))
        self.blocks = nn.ModuleList(HeadBlock(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 2 * width)
        self.output = nn.Linear(width, action_dim)
        self.register_buffer("signal", torch.empty(diffusion_steps), persistent=False)
        self.register_buffer("frequencies", torch.empty(width // 2), persistent=False)

    def init_buffers(self) -> None:
        half = len(self.frequencies)
        exponents = np.arange(half) / half
        frequencies = np.exp(-math.log(_TIMESTEP_PERIOD) * exponents)
        self.signal.copy_(torch.from_numpy(signal_levels(len(self.signal))))
        self.frequencies.copy_(torch.from_numpy(frequencies))

    def add_noise(self, actions: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """(N, T, A) actions and noise, (N,) timesteps to (N, T, A) noisy actions, in float32."""
        signal = self.signal[timestep].view(-1, 1, 1)
        return signal.sqrt() * actions.float() + (1 - signal).sqrt() * noise.float()

    def forward(self, noisy: Tensor, timestep: Tensor, cognition: Tensor) -> Tensor:
        """(N, T, A), (N,) int64 and (N, D) to (N, T, A): the noise in `noisy`."""
        dtype = self.action.weight.dtype
        angles = timestep.unsqueeze(1).float() * self.frequencies
        waves = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
        time = self.timestep2(F.silu(self.timestep1(waves)))
        condition = time + self.cognition(cognition)
        tokens = self.action(noisy.to(dtype)) + self.step_position
        for block in self.blocks:
            tokens = block(tokens, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        return self.output(self.norm(tokens) * (1 + scale) + shift)

    @torch.no_grad()
    def sample(self, cognition: Tensor, noise: Tensor) -> Tensor:
        """(N, D) conditions and (N, T, A) unit noise to (N, T, A) action chunks in [-1, 1]."""
        noisy = clean = noise.float()
        steps = self._sampling_timesteps
        for timestep, following in zip(steps, [*steps[1:], None], strict=True):
            at = torch.full((len(noisy),), timestep, device=noisy.device)
            signal = self.signal[timestep]
            predicted = self(noisy, at, cognition).float()
            # Actions are normalised to [-1, 1]; unclamped, an error at a noisy step explodes.
            clean = ((noisy - (1 - signal).sqrt() * predicted) / signal.sqrt()).clamp(-1, 1)
            if following is not None:
                remaining = (noisy - signal.sqrt() * clean) / (1 - signal).sqrt()
                signal = self.signal[following]
                noisy = signal.sqrt() * clean + (1 - signal).sqrt() * remaining
        return clean
