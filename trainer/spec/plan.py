"""The plan: what a run does, worked out exactly, in the form that every process reads.

`plan.json` in the run directory is the newest plan, `attempts/K/plan.json` what attempt K ran.
"""

import hashlib
import math
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trainer.spec.run import RunSpec

#: Raised with every change that an older vitra could not read.
PLAN_VERSION = 1


class ElasticShape(BaseModel):
    """One node count that an elastic run can use, and the batch equation there."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    nodes: int = Field(ge=1)
    world_size: int = Field(ge=1)
    per_device_batch_size: int = Field(ge=1)
    grad_accumulation_steps: int = Field(ge=1)


class Plan(BaseModel):
    """A run spec with everything worked out.

    Always true, also after reading it back: `per_device_batch_size x world_size x
    grad_accumulation_steps == global_batch_size` and `world_size == nodes x tasks_per_node`.

    `total_steps` and `warmup_steps` count optimizer steps; both are None until the probe has seen
    how many samples there are (`n_samples`), where `train.epochs` decides. `threads_per_rank` is
    fixed for the life of the run, because results depend on it. `elastic` is empty for a run of a
    fixed size; `unusable_nodes` lists the node counts of the range that have no exact plan.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    version: int = PLAN_VERSION
    run_id: str
    run_dir: str
    spec: RunSpec
    spec_digest: str
    nodes: int = Field(ge=1)
    tasks_per_node: int = Field(ge=1)
    world_size: int = Field(ge=1)
    per_device_batch_size: int = Field(ge=1)
    grad_accumulation_steps: int = Field(ge=1)
    n_samples: int | None = Field(default=None, ge=1)
    total_steps: int | None = Field(default=None, ge=1)
    warmup_steps: int | None = Field(default=None, ge=0)
    time_limit_min: int = Field(ge=1)
    threads_per_rank: int = Field(ge=1)
    checkpoint_uri: str
    elastic: tuple[ElasticShape, ...] = ()
    unusable_nodes: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _exact(self) -> Self:
        if self.version > PLAN_VERSION:
            raise ValueError(
                f"plan version {self.version} is newer than this vitra reads ({PLAN_VERSION})"
            )
        batch = self.spec.train.global_batch_size
        product = self.per_device_batch_size * self.world_size * self.grad_accumulation_steps
        if product != batch:
            raise ValueError(
                f"per_device_batch_size {self.per_device_batch_size} x "
                f"world_size {self.world_size} x "
                f"grad_accumulation_steps {self.grad_accumulation_steps} = {product}, "
                f"not global_batch_size {batch}"
            )
        if self.nodes * self.tasks_per_node != self.world_size:
            raise ValueError(
                f"nodes {self.nodes} x tasks_per_node {self.tasks_per_node} "
                f"is not world_size {self.world_size}"
            )
        for shape in self.elastic:
            if (
                shape.per_device_batch_size * shape.world_size * shape.grad_accumulation_steps
                != batch
            ):
                raise ValueError(
                    f"elastic shape for {shape.nodes} nodes does not give global_batch_size {batch}"
                )
        return self

    @property
    def global_batch_size(self) -> int:
        """Samples a step, over all ranks and micro-batches."""
        return self.spec.train.global_batch_size

    def with_samples(self, n_samples: int) -> Self:
        """The plan with the size of the training data known: fixes total_steps and warmup_steps."""
        total = self.spec.train.max_steps
        if total is None:
            assert self.spec.train.epochs is not None, (
                "the spec demands one of max_steps and epochs"
            )
            total = math.ceil(self.spec.train.epochs * n_samples / self.global_batch_size)
        return self.model_copy(
            update={
                "n_samples": n_samples,
                "total_steps": total,
                "warmup_steps": warmup_steps(self.spec.train.warmup_ratio, total),
            }
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a plan back; every invariant is checked again."""
        return cls.model_validate_json(path.read_bytes())


def warmup_steps(warmup_ratio: float, total_steps: int) -> int:
    """Optimizer steps of linear warm-up: int(warmup_ratio x total)."""
    return int(warmup_ratio * total_steps)


def spec_digest(spec: RunSpec) -> str:
    """blake2b-128 of the spec with its defaults filled in, so equal however it was written."""
    return hashlib.blake2b(spec.model_dump_json().encode(), digest_size=16).hexdigest()
