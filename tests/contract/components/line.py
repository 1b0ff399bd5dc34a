"""A model and a data set of a user's own: all that a project has to write to be trained by vitra.

Not part of the package: the tests copy it into a project of its own.
"""

import numpy as np
import torch
from torch import nn


class Points:
    """Noisy points of a line; the noise is drawn anew in each epoch, from what it is given."""

    meta = {"features": 3}  # noqa: RUF012 - as short as a user would write it

    def __init__(self, options, seed):
        self.x = np.random.default_rng(seed).normal(size=(options["samples"], 3)).astype("float32")

    def __len__(self):
        return len(self.x)

    def sample(self, index, rng):
        noise = 0.1 * rng.generator("noise").standard_normal()
        return {"x": self.x[index], "y": np.float32(self.x[index].sum() + noise)}

    def collate(self, samples):
        return {name: torch.tensor(np.stack([s[name] for s in samples])) for name in samples[0]}


class Line(nn.Module):
    """A small network with dropout, so that a resume that forgets randomness is seen."""

    backbone_prefixes = ("body.",)
    shard_classes = checkpoint_classes = (nn.Linear,)

    def __init__(self, options, context):
        super().__init__()
        self.body = nn.Linear(context.data_meta["features"], options["width"])
        self.head = nn.Linear(options["width"], 1)

    def forward(self, batch):
        hidden = nn.functional.dropout(self.body(batch["x"]).tanh(), 0.1, self.training)
        return (self.head(hidden).squeeze(-1).float() - batch["y"]).square().sum()

    def loss_count(self, batch):
        return len(batch["y"])

    def init_parameter(self, name, tensor, generator):  # noqa: ARG002
        tensor.normal_(0.0, 0.3, generator=generator)

    def init_buffers(self):
        pass
