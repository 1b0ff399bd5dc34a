"""Who a rank is: the only place in the trainer that reads the launch variables."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from trainer.spec.errors import RankMismatch

#: Set by vitra in every process, so a spec may not set them and a shell's own values are ignored.
LAUNCH_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "VITRA_RUN_ID",
    "VITRA_RUN_DIR",
    "VITRA_ATTEMPT",
)


class RankInfo(BaseModel):
    """One process's place in the run.

    Always: rank < world_size and local_rank < local_world_size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    local_rank: int = Field(ge=0)
    local_world_size: int = Field(ge=1)
    master_addr: str
    master_port: int = Field(ge=1, le=65535)
    run_id: str
    attempt: int = Field(ge=0)

    @model_validator(mode="after")
    def _within_the_world(self) -> RankInfo:
        if self.rank >= self.world_size or self.local_rank >= self.local_world_size:
            raise ValueError(
                f"rank {self.rank} of {self.world_size}, local rank {self.local_rank} of "
                f"{self.local_world_size}: a rank must be below its world size"
            )
        return self

    @property
    def is_primary(self) -> bool:
        """True on the one process (rank 0 of the whole world) that writes what is written once."""
        return self.rank == 0

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> RankInfo:
        """Read the launch variables.

        Raises:
            RankMismatch: a variable is missing or makes no sense.
        """
        missing = [name for name in LAUNCH_VARIABLES if not environ.get(name)]
        if missing:
            raise RankMismatch(
                f"not set: {', '.join(missing)}",
                "the trainer is started by vitra, which sets them; use `vitra submit --local`",
            )
        try:
            return cls.model_validate(
                {
                    "rank": environ["RANK"],
                    "world_size": environ["WORLD_SIZE"],
                    "local_rank": environ["LOCAL_RANK"],
                    "local_world_size": environ["LOCAL_WORLD_SIZE"],
                    "master_addr": environ["MASTER_ADDR"],
                    "master_port": environ["MASTER_PORT"],
                    "run_id": environ["VITRA_RUN_ID"],
                    "attempt": environ["VITRA_ATTEMPT"],
                }
            )
        except ValidationError as err:
            faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in err.errors())
            raise RankMismatch(f"launch variables make no sense: {faults}") from err
