"""Does the model do what the expert did? Held-out errors beside those of simpler guesses.

Mean squared errors of normalised actions over the valid steps of held-out chunks:

    mse_model              the mean of `samples` chunks that the model samples
    mse_task_mean          the task's mean action over the training data, the same for every step
    mse_unconditioned      the same model with its null condition in place of what it sees
    mse_wrong_instruction  the same model, told to do another of the tasks

A model that learned anything from image, state and instruction has the first well below the others.
A low training loss alone proves little: the noise can be told from its action without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trainer.data.keyed import keyed_generator
from trainer.data.samples import HoldsOut

_ERRORS = ("model", "task_mean", "unconditioned", "wrong_instruction")


class SamplesActions(Protocol):
    """What of a model is judged. B: samples, D: width, T: steps, A: action dimensions."""

    def cognition(self, image: Tensor, task: Tensor, state: Tensor) -> Tensor:
        """(B, 3, H, W) uint8, (B,) int64 and (B, state_dim) to the condition (B, D)."""
        ...

    def sample_actions(self, cognition: Tensor, dropped: Tensor, noise: Tensor) -> Tensor:
        """(B, D), (B,) bool and unit noise (B, T, A) to action chunks (B, T, A).

        Where `dropped` is true the model sees nothing of the condition.
        """
        ...


@torch.no_grad()
def held_out_errors(
    model: SamplesActions,
    data: HoldsOut,
    *,
    frames: int,
    samples: int,
    seed: int,
    rank: int,
    world_size: int,
    device: torch.device,
) -> dict[str, float]:
    """This rank's sums of squared errors over at most `frames` held-out samples, evenly spaced.

    Added up over the ranks they are the same at every world size: each frame is judged by itself
    and with its own noise. Every rank runs the model equally often, as sharded models require.
    """
    tasks = len(data.meta.instructions)
    count = min(frames, data.held_out)
    sums: dict[str, float] = dict.fromkeys(("elements", *_ERRORS), 0.0)
    if tasks < 2:
        del sums["wrong_instruction"]
    for first in range(0, count, world_size):
        place = first + rank
        number = min(place, count - 1) * data.held_out // count
        expert = data.held_out_sample(number)
        task = int(expert["task"])
        told = [task]
        if tasks > 1:
            told.append((task + 1 + number % (tasks - 1)) % tasks)
        noise = np.stack(
            [
                keyed_generator(seed, "evaluation", number, s).standard_normal(
                    expert["action"].shape, dtype=np.float32
                )
                for s in range(samples)
            ]
        )
        guesses = _sampled_means(model, expert, told, torch.from_numpy(noise).to(device), device)
        guesses["task_mean"] = np.broadcast_to(data.task_mean_action[task], noise.shape[1:])
        if place >= count:
            continue
        valid = expert["mask"][:, None] & np.ones_like(expert["action"], dtype=np.bool_)
        sums["elements"] += float(valid.sum())
        for name, guess in guesses.items():
            errors = (guess.astype(np.float64) - expert["action"])[valid]
            sums[name] += float((errors**2).sum())
    return sums


def mean_errors(sums: Mapping[str, float]) -> dict[str, float]:
    """The figures listed above from the sums of all ranks; none where nothing was held out."""
    elements = sums.get("elements", 0.0)
    if not elements:
        return {}
    return {f"mse_{name}": sums[name] / elements for name in _ERRORS if name in sums}


def _sampled_means(
    model: SamplesActions,
    expert: Mapping[str, np.ndarray],
    told: list[int],
    noise: Tensor,
    device: torch.device,
) -> dict[str, np.ndarray]:
    """The mean of the chunks sampled from each condition; all start at the same noise."""

    def repeated(name: str) -> Tensor:
        return torch.from_numpy(np.stack([expert[name]] * len(told))).to(device)

    cognition = model.cognition(
        repeated("image"), torch.tensor(told, device=device), repeated("state")
    )
    conditions = torch.cat([cognition, cognition[:1]])
    dropped = torch.arange(len(conditions), device=device) == len(told)
    chunks = model.sample_actions(
        conditions.repeat_interleave(len(noise), dim=0),
        dropped.repeat_interleave(len(noise)),
        noise.repeat(len(conditions), 1, 1),
    )
    means = chunks.unflatten(0, (len(conditions), len(noise))).mean(dim=1).cpu().numpy()
    names = [*("model", "wrong_instruction")[: len(told)], "unconditioned"]
    return dict(zip(names, means, strict=True))
