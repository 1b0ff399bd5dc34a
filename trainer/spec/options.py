"""The options of the built-in models and data sets, checked together with the spec.

`model.options` and `data.options` hold these with their defaults filled in; a component reads them
back with `VlaOptions.model_validate(options)`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import Field, ValidationInfo, field_validator

from trainer.spec.fields import Count, CountOrZero, Flag, Fraction, SpecModel, Text, refusal


class VlaOptions(SpecModel):
    """The built-in `vla` model. Shapes of images, states and actions come from the data.

    `dim`, `layers` and `heads` are the backbone's; `action_*` the action head's. `max_words` and
    `vocabulary` bound the instruction (hashed words); the two steps count diffusion steps in
    training and denoising steps when sampling. At the end of a run the mean of `eval_samples`
    sampled chunks is compared with what the expert did, on at most `eval_frames` held-out frames.
    """

    dim: Count = 96
    layers: Count = 3
    heads: Count = Field(default=4, validate_default=True)
    action_width: Count = 96
    action_layers: Count = 3
    action_heads: Count = Field(default=4, validate_default=True)
    max_words: Count = 16
    vocabulary: Count = 1024
    dropout: Fraction = 0.0
    condition_dropout: Fraction = 0.1
    diffusion_steps: Count = 100
    sampling_steps: Count = Field(default=10, validate_default=True)
    eval_frames: Count = 64
    eval_samples: Count = 16

    @field_validator("heads", "action_heads")
    @classmethod
    def _divides_the_width(cls, heads: int, info: ValidationInfo) -> int:
        name = "dim" if info.field_name == "heads" else "action_width"
        width = info.data.get(name)
        if width is not None and width % heads:
            raise refusal(f"must divide {name}, which is {width}, found {{found}}", heads)
        return heads

    @field_validator("action_width")
    @classmethod
    def _is_even(cls, width: int) -> int:
        # The timestep's embedding is half sines and half cosines.
        if width % 2:
            raise refusal("must be even, found {found}", width)
        return width

    @field_validator("sampling_steps")
    @classmethod
    def _within_the_diffusion(cls, steps: int, info: ValidationInfo) -> int:
        total = info.data.get("diffusion_steps")
        if total is not None and steps > total:
            raise refusal(
                f"must be at most diffusion_steps, which is {total}, found {{found}}", steps
            )
        return steps


class LerobotOptions(SpecModel):
    """The `lerobot` data: any LeRobot v3.0 data set.

    `root` is its directory (unset: the data set that ships with vitra). One sample is one frame
    with the `chunk` actions that follow; `holdout_episodes` episodes, of each task in turn its
    last, are kept for evaluation. `image_key` unset: the data set's first camera. `image_size`
    scales the images to a square of so many pixels. If all decoded frames fit into `cache_mb` MiB,
    each rank keeps them in memory; else every frame is decoded when it is needed.
    """

    root: Text | None = None
    chunk: Count = 16
    holdout_episodes: CountOrZero = 4
    image_key: Text | None = None
    image_size: Count | None = None
    state_key: Text = "observation.state"
    action_key: Text = "action"
    cache_mb: CountOrZero = 512


class SyntheticOptions(SpecModel):
    """The `synthetic` data, for tests and benches.

    `samples` are trained on and `holdout` more are kept for evaluation; `mask` makes the valid
    lengths of the chunks unequal, as episode ends do.
    """

    samples: Count = 256
    chunk: Count = 8
    action_dim: Count = 4
    state_dim: Count = 4
    image_size: Count = 16
    holdout: CountOrZero = 0
    mask: Flag = True


MODEL_OPTIONS: Mapping[str, type[SpecModel]] = MappingProxyType({"vla": VlaOptions})
DATA_OPTIONS: Mapping[str, type[SpecModel]] = MappingProxyType(
    {"lerobot": LerobotOptions, "synthetic": SyntheticOptions}
)
