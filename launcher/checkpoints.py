"""The checkpoints of a run or at a place, for people and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.registry import find_run, read_plan
from trainer.spec.errors import NotFound


def list_checkpoints(place: str, run_root: Path, *, verify: bool) -> dict[str, Any]:
    """What is at a checkpoint place; `place` is a run or the place itself.

    `complete` is newest first; `damaged` has what a manifest promises and the files do not keep,
    with --verify down to every byte; `incomplete` what never was a checkpoint.

    Raises:
        NotFound: neither a run nor a place with checkpoints.
    """
    from trainer.store.checkpoints import CheckpointStore
    from trainer.store.storage import open_storage

    uri, options = _place(place, run_root)
    store = CheckpointStore.existing(open_storage(uri, options))
    survey = store.survey()
    complete: list[dict[str, Any]] = []
    damaged = [_row(one.step, one.attempt, one.reason) for one in survey.damaged]
    for ref in survey.complete:
        problems = store.verify(ref) if verify else []
        if problems and not store.is_current(ref):
            continue  # retired or replaced by the running attempt while it was read
        if problems:
            damaged.append(_row(ref.step, ref.attempt, "; ".join(problems)))
            continue
        manifest = ref.manifest
        complete.append(
            {
                "step": ref.step,
                "attempt": ref.attempt,
                "size_bytes": manifest.size_bytes,
                "files": len(manifest.files),
                "world_size": manifest.world_size,
                "created_at": manifest.created_at,
                "verified": verify,
            }
        )
    incomplete = [
        _row(one.step, one.attempt, one.reason) for one in (*survey.torn, *survey.ignored)
    ]
    return {
        "uri": uri,
        "run_id": store.run_id,
        "complete": complete,
        "damaged": sorted(damaged, key=lambda d: d["step"]),
        "incomplete": sorted(incomplete, key=lambda d: d["step"]),
        "foreign": list(survey.foreign),
    }


def _row(step: int, attempt: int | None, reason: str) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "reason": reason}


def _place(place: str, run_root: Path) -> tuple[str, dict[str, Any]]:
    if "://" in place or (Path(place) / "owner.json").is_file():
        return place, {}
    try:
        run_dir = find_run(place, run_root)
    except NotFound as err:
        if Path(place).is_dir():
            raise NotFound(
                f"{place}: neither a run nor a checkpoint place (no run.json, no owner.json)"
            ) from err
        raise
    planned = read_plan(run_dir)
    return planned.checkpoint_uri, planned.spec.checkpoint.storage_options
