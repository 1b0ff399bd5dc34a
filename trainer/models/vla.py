"""The built-in `vla`: image, instruction and state in, action chunk out.

Built as VITRA is (https://arxiv.org/abs/2510.21571): a vision-language backbone with a learned
cognition token, whose output conditions a diffusion transformer over the action chunk; but small
enough to learn on a laptop's processor. In training the backbone runs once for each sample and the
head R times, each time with other noise at another timestep.

B: samples, R: repeats of a sample, T: steps of a chunk, A: action dimensions, D: width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.components import Batch, Dataset, ModelContext
from trainer.data.samples import DataMeta, HoldsOut
from trainer.models.backbone import PATCH, Backbone, BackboneBlock, hash_words
from trainer.models.diffusion import DiffusionDraws, DiffusionHead, HeadBlock
from trainer.models.evaluation import held_out_errors, mean_errors
from trainer.spec.errors import UsageError
from trainer.spec.options import VlaOptions

_EMBEDDING_STD = 0.02
#: Zero at the start: every block begins as the identity, and the first prediction is 0.
_ZERO_AT_START = ("modulation.weight", "output.weight")


def build(options: Mapping[str, Any], context: ModelContext) -> Vla:
    """The model that `options` (see `VlaOptions`) describe, sized for the data.

    Its parameters hold no values until `init_parameter` has filled each.

    Raises:
        UsageError: the data set does not offer what this model takes in.
    """
    meta = context.data_meta
    if not isinstance(meta, DataMeta):
        raise UsageError(
            f"model.kind=vla: the data set's meta is a {type(meta).__name__}, not a"
            " trainer.data.samples.DataMeta",
            "use data.kind lerobot or synthetic, or offer a DataMeta and its fields of a sample",
        )
    if min(meta.image_shape[1:]) < PATCH:
        raise UsageError(
            f"model.kind=vla: images of {meta.image_shape[2]}x{meta.image_shape[1]} pixels are"
            f" smaller than one token, {PATCH}x{PATCH}"
        )
    return Vla(VlaOptions.model_validate(options), meta, context.repeated_diffusion_steps)


class Vla(nn.Module):
    """Offers `Model`, `DrawsPerSample` and `Evaluates`."""

    backbone_prefixes = ("backbone.",)
    shard_classes = (BackboneBlock, HeadBlock)
    checkpoint_classes = (BackboneBlock, HeadBlock)

    words: Tensor

    def __init__(self, options: VlaOptions, meta: DataMeta, repeats: int) -> None:
        super().__init__()
        self._options = options
        self._instructions = meta.instructions
        self.backbone = Backbone(
            height=meta.image_shape[1],
            width=meta.image_shape[2],
            state_dim=meta.state_dim,
            dim=options.dim,
            layers=options.layers,
            heads=options.heads,
            dropout=options.dropout,
            vocabulary=options.vocabulary,
            max_words=options.max_words,
        )
        self.head = DiffusionHead(
            chunk=meta.chunk,
            action_dim=meta.action_dim,
            condition_dim=options.dim,
            width=options.action_width,
            layers=options.action_layers,
            heads=options.action_heads,
            dropout=options.dropout,
            diffusion_steps=options.diffusion_steps,
            sampling_steps=options.sampling_steps,
        )
        words = torch.empty(len(meta.instructions), options.max_words, dtype=torch.int64)
        self.register_buffer("words", words, persistent=False)
        self.draws = DiffusionDraws(repeats, options.diffusion_steps, options.condition_dropout)

    # ---------------------------------------------------------------- training

    def forward(self, batch: Batch) -> Tensor:
        """The sum of squared errors of the predicted noise over valid elements, float32."""
        repeats = batch["noise"].shape[1]
        noise = batch["noise"].flatten(0, 1).float()
        timestep = batch["timestep"].flatten()
        actions = batch["action"].repeat_interleave(repeats, dim=0)
        valid = batch["mask"].repeat_interleave(repeats, dim=0).unsqueeze(-1)

        cognition = self.cognition(batch["image"], batch["task"], batch["state"])
        condition = self._condition(
            cognition.repeat_interleave(repeats, dim=0), batch["drop_condition"].flatten()
        )
        noisy = self.head.add_noise(actions, noise, timestep)
        predicted = self.head(noisy, timestep, condition).float()
        return ((predicted - noise).square() * valid).sum()

    def loss_count(self, batch: Batch) -> int:
        """Valid steps x action dimensions x repeats."""
        repeats = batch["noise"].shape[1]
        return int(batch["mask"].sum()) * batch["action"].shape[-1] * repeats

    @torch.no_grad()
    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator) -> None:
        """Truncated normal by fan-in for weights, 0.02 for embeddings; zeros and ones by name."""
        if name.endswith("bias") or name.endswith(_ZERO_AT_START):
            tensor.zero_()
        elif "norm" in name:
            tensor.fill_(1.0)
        elif name.endswith("weight") and "embedding" not in name:
            fan_in = tensor[0].numel()
            _truncated_normal(tensor, fan_in**-0.5, generator)
        else:
            _truncated_normal(tensor, _EMBEDDING_STD, generator)

    @torch.no_grad()
    def init_buffers(self) -> None:
        """Hash the instructions' words; fill the noise schedule and timestep frequencies."""
        options = self._options
        rows = [hash_words(t, options.vocabulary, options.max_words) for t in self._instructions]
        self.words.copy_(torch.tensor(rows, dtype=torch.int64))
        self.head.init_buffers()

    # ------------------------------------------------------------------ acting

    def cognition(self, image: Tensor, task: Tensor, state: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, (B,) int64 and (B, state_dim) to (B, D)."""
        return self.backbone(image, self.words[task], state)

    def sample_actions(self, cognition: Tensor, dropped: Tensor, noise: Tensor) -> Tensor:
        """(B, D) cognition, (B,) bool and unit noise (B, T, A) to normalised chunks (B, T, A).

        Where `dropped` is true the null condition takes the cognition's place.
        """
        return self.head.sample(self._condition(cognition, dropped), noise)

    def _condition(self, cognition: Tensor, dropped: Tensor) -> Tensor:
        null = self.head.null_condition.to(cognition.dtype)
        return torch.where(dropped.unsqueeze(-1), null, cognition)

    # -------------------------------------------------------------- evaluation

    def evaluate(self, data: Dataset, seed: int, rank: int, world_size: int) -> Mapping[str, float]:
        """This rank's sums of held-out errors; none for data that holds nothing out."""
        if not isinstance(data, HoldsOut) or not data.held_out:
            return {}
        was_training = self.training
        self.eval()
        try:
            return held_out_errors(
                self,
                data,
                frames=self._options.eval_frames,
                samples=self._options.eval_samples,
                seed=seed,
                rank=rank,
                world_size=world_size,
                device=self.words.device,
            )
        finally:
            self.train(was_training)

    def summarize_evaluation(self, sums: Mapping[str, float]) -> Mapping[str, float]:
        """mse_model, mse_task_mean, mse_unconditioned and mse_wrong_instruction."""
        return mean_errors(sums)


def _truncated_normal(tensor: Tensor, std: float, generator: torch.Generator) -> None:
    nn.init.trunc_normal_(tensor, std=std, a=-2 * std, b=2 * std, generator=generator)
