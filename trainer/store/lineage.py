"""Which checkpoints count: the rule that makes a late writer harmless, without locks or clocks.

An attempt claims its number by creating `attempt-<K>.json`, and the claim says from which
checkpoint it goes on at most. What an older attempt has at a later step than that is from then on
no part of the run, whenever it was written. So a process on a node that was cut off may go on
committing for as long as it lives: nobody will ever resume from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, Field

_CLAIM_NAME = re.compile(r"attempt-([1-9][0-9]*)\.json")


class Claim(BaseModel):
    """One attempt's claim on the run (`attempt-<K>.json`). Never changed once it is there.

    `resume` is the (step, attempt) of the newest checkpoint that counted when the claim was made,
    None where there was none: an upper bound, since damage may send the attempt further back.
    `job` and `restart` name the scheduler's job; `claimed_at` is UTC, ISO 8601.
    """

    # A claim of a newer vitra must stay readable: its lineage holds for everybody.
    model_config = ConfigDict(frozen=True, extra="ignore")

    attempt: int = Field(ge=1)
    resume: tuple[int, int] | None
    job: str | None = None
    restart: int | None = None
    claimed_at: str | None = None

    @property
    def resume_step(self) -> int | None:
        return self.resume[0] if self.resume else None


def claim_name(attempt: int) -> str:
    """The name of the file that claims an attempt."""
    return f"attempt-{attempt}.json"


def claimed_attempt(name: str) -> int | None:
    """The attempt that a file name claims; None for any other name."""
    match = _CLAIM_NAME.fullmatch(name)
    return int(match[1]) if match else None


def why_ignored(step: int, attempt: int, claims: Iterable[Claim]) -> str | None:
    """Why a checkpoint does not count; None if it does.

    It counts only if its step is at most the resume step of every newer attempt's claim.
    """
    for claim in claims:
        if claim.attempt > attempt:
            if claim.resume_step is None:
                return f"attempt {claim.attempt} started afresh, without attempt {attempt}"
            if step > claim.resume_step:
                return (
                    f"attempt {claim.attempt} went on from step {claim.resume_step}, "
                    f"without attempt {attempt}'s later steps"
                )
    return None


def rank_of(step: int, attempt: int) -> tuple[int, int]:
    """Sort key among checkpoints that count, worst first: by attempt, then by step.

    The newest attempt's come first even at lower steps, because it went back for a reason.
    """
    return attempt, step


def newest_claim(claims: Sequence[Claim]) -> Claim | None:
    """The claim of the newest attempt; None where there is none."""
    return max(claims, key=lambda claim: claim.attempt, default=None)
