"""The only reader of what Slurm tells a process in its environment. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchJob:
    """The job whose batch step this process belongs to.

    `restarts` counts the lives before this one, `nodes` is Slurm's list of the job's nodes and
    `host` this node's name.
    """

    job_id: str
    restarts: int
    nodes: str
    host: str

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> BatchJob | None:
        """None outside a batch job."""
        try:
            return cls(
                job_id=environ["SLURM_JOB_ID"],
                # Not set in a job's first life.
                restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
                nodes=environ["SLURM_JOB_NODELIST"],
                host=environ["SLURMD_NODENAME"],
            )
        except (KeyError, ValueError):
            return None


def is_step_task(environ: Mapping[str, str]) -> bool:
    """Whether srun has started this process, and numbered it."""
    return "SLURM_PROCID" in environ


def rank_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """A rank's own launch variables, from its place in the job step."""
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
    }
