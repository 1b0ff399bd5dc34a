"""The runs under a run root, a line each: for looking over many of them at once.

A run costs a few small reads here, however long it has trained, and no look at its checkpoints:
what is shown of them is what the run itself recorded. `vitra status` looks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from launcher.pace import Pace, pace
from launcher.registry import read_record, runs
from launcher.slurm import Slurm
from launcher.standing import JobBook, standing
from launcher.wording import clock_time, table
from trainer.spec.errors import VitraError
from trainer.spec.outcome import RunState
from trainer.spec.rundir import RunDir, read_lines

_HEADINGS = ("RUN", "STATE", "ATTEMPT", "STEP", "CHECKPOINT", "NODES", "ETA")


def list_runs(run_root: Path, slurm: Slurm, *, limit: int | None) -> dict[str, Any]:
    """The facts of `vitra ps --json`: the newest `limit` runs (None: all), newest first.

    Slurm's queue is asked for once, and only where there is a run of Slurm's. `more` tells that
    there are others. A run whose files cannot be read is listed with its `problem`, and what can be
    known all the same.

    Raises:
        StorageError: the root is there and cannot be read.
    """
    found = runs(run_root)
    shown = [RunDir(run_root / run_id) for run_id in islice(found, limit)]
    book = JobBook(slurm, shown)
    return {
        "run_root": str(run_root),
        "runs": [_row(run_dir, book) for run_dir in shown],
        "more": next(found, None) is not None,
    }


def run_lines(facts: Mapping[str, Any], width: int | None = None) -> list[str]:
    """`vitra ps`: a table; a block for each run where a terminal of `width` has no room for it."""
    cells = [_cells(row) for row in facts["runs"]]
    lines = table([_HEADINGS, *cells])
    if width is not None and max(map(len, lines)) > width:
        return [
            line for row, own in zip(facts["runs"], cells, strict=True) for line in _block(row, own)
        ]
    problems = ["", *(row["problem"] or "" for row in facts["runs"])]
    return [f"{line}  {what}" if what else line for line, what in zip(lines, problems, strict=True)]


def _block(row: Mapping[str, Any], cells: Sequence[str]) -> list[str]:
    """What the table says of a run, below each other."""
    run_id, state, *others = cells
    named = zip(_HEADINGS[2:], others, strict=True)
    known = [
        f"{name.lower()} {cell}" if name != "ETA" else f"ETA {cell}"
        for name, cell in named
        if cell != "-"
    ]
    lines = [run_id, f"  {', '.join([state, *known])}"]
    return [*lines, f"  {row['problem']}"] if row["problem"] else lines


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    def text(value: object) -> str:
        return "-" if value is None else str(value)

    total = "?" if row["total_steps"] is None else row["total_steps"]
    return (
        row["run_id"],
        "damaged" if row["attempt"] is None else row["state"],
        text(row["attempt"]),
        "-" if row["step"] is None else f"{row['step']}/{total}",
        text(row["last_checkpoint_step"]),
        text(row["nodes"]),
        "-" if row["eta_s"] is None else clock_time(row["eta_s"]),
    )


def _row(run_dir: RunDir, book: JobBook) -> dict[str, Any]:
    row: dict[str, Any] = {
        "run_id": run_dir.path.name,
        "run_dir": str(run_dir.path),
        "name": None,
        "state": RunState.UNKNOWN.value,
        "job_id": None,
        "attempt": None,
        "step": None,
        "total_steps": None,
        "last_checkpoint_step": None,
        "nodes": None,
        "eta_s": None,
        "problem": None,
    }
    try:
        _fill(row, run_dir, book)
    except VitraError as err:
        row["problem"] = err.message
    except OSError as err:
        row["problem"] = f"cannot be read: {err.filename}: {err.strerror}"
    # Files that were tampered with may hold anything, and must not hide the other runs.
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        row["problem"] = f"its records are damaged: {type(err).__name__}: {err}"
    return row


def _fill(row: dict[str, Any], run_dir: RunDir, book: JobBook) -> None:
    """Add what is known to `row`, as far as it goes."""
    record = read_record(run_dir)
    row["name"] = record.name
    stands = standing(run_dir, record, book)
    events = list(read_lines(run_dir.events))
    state = stands.state
    row["state"], row["job_id"] = state.value, stands.job_id
    row["last_checkpoint_step"] = _last_saved(events)
    numbers = run_dir.attempt_numbers()
    row["attempt"] = max(numbers, default=0)
    now = pace(run_dir.attempt(numbers[-1])) if numbers else Pace(None, None)
    row["step"] = _resume_step(events) if now.step is None else now.step
    try:
        plan = json.loads(run_dir.plan.read_bytes())
        row["total_steps"], row["nodes"] = plan["total_steps"], plan["nodes"]
    except (OSError, ValueError, TypeError, KeyError):
        row["problem"] = "its plan.json cannot be read"
        return
    if state is RunState.RUNNING:
        row["eta_s"] = now.to_go_s(row["total_steps"])


def _last_saved(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The step of the newest checkpoint of those that count, as the run recorded it."""
    step: int | None = None
    for event in events:
        match event.get("event"):
            case "saved":
                step = int(event["step"])
            # Damage may send an attempt further back; from there on only that counts.
            case "started":
                step = int(event["step"]) or None
            case _:
                pass
    return step


def _resume_step(events: Iterable[Mapping[str, Any]]) -> int:
    """The step that the newest start went on from."""
    steps = [int(event["step"]) for event in events if event.get("event") == "started"]
    return steps[-1] if steps else 0
