"""What only a machine with a GPU can show: NCCL, bfloat16, pinned batches, and an exact resume.

Run by smoke.sh, on one GPU. Each check is a real run through the command line; one line each is
printed, and the exit code is 1 if any fails.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.e2e.runs import Run, spec

_STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp-grad": {"strategy": "fsdp-grad"},
    "fsdp-full": {"strategy": "fsdp-full", "enable_gradient_checkpointing": True},
}


def on_gpu(train: dict[str, Any]) -> dict[str, Any]:
    """One process on one GPU, world 1 over NCCL; batches from a worker, through pinned memory."""
    precise = {"enable_mixed_precision_training": True, "deterministic": True}
    document = spec(
        1,
        train={**precise, **train, "max_steps": 40},
        data={"num_workers": 1},
        resources={"gpus_per_node": 1},
    )
    del document["resources"]["tasks_per_node"]
    return document


def check(root: Path, name: str, train: dict[str, Any]) -> str:
    """Train twice, once with a kill in the middle; returns what differs, "" for nothing."""
    whole, killed = Run(root / "whole", on_gpu(train)), Run(root / "killed", on_gpu(train))
    whole.finish()
    killed.kill_at(12, random.Random(name))
    killed.finish()
    one, other = whole.results(), killed.results()
    return ", ".join(part for part in one if one[part] != other[part])


def main() -> int:
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        for name, train in _STRATEGIES.items():
            began = time.monotonic()
            try:
                differs = check(Path(directory) / name, name, train)
                problem = f"the resumed run differs: {differs}" if differs else ""
            except AssertionError as err:
                problem = str(err)
            failed |= bool(problem)
            line = {
                "strategy": name,
                "equal": not problem,
                "seconds": round(time.monotonic() - began, 1),
                **({"problem": problem} if problem else {}),
            }
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
