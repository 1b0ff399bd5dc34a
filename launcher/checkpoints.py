"""The checkpoints of a run or at a place, for people and scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from launcher.registry import find_run, read_plan
from launcher.wording import size_text
from trainer.spec.errors import Fenced, NotFound, StorageError, UsageError
from trainer.spec.rundir import RunDir


def list_checkpoints(place: str, run_root: Path, *, verify: bool) -> dict[str, Any]:
    """What is at a checkpoint place; `place` is a run or the place itself.

    `complete` is newest first; `damaged` has what a manifest promises and the files do not keep,
    with --verify down to every byte; `incomplete` what never was a checkpoint.

    Raises:
        NotFound: neither a run nor a place with checkpoints.
    """
    from trainer.store.checkpoints import CheckpointStore
    from trainer.store.storage import open_storage

    uri, options = checkpoint_place(place, run_root)
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


def prune_checkpoints(
    place: str, run_root: Path, *, keep_last: int | None, keep_every: int | None
) -> dict[str, Any]:
    """Delete what retention does not keep; None: as the run's plan has it.

    Safe beside a running attempt: the newest ones that are kept have been read byte for byte, and
    while fewer than `keep_last` are good nothing is deleted at all.

    Returns keep_last, keep_every, removed (steps), freed_bytes, leftovers (steps of which only what
    a killed save had left was removed) and warnings of what could not be deleted.

    Raises:
        NotFound: neither a run nor a place with checkpoints. UsageError: too few would be kept.
        StorageError: a new attempt started meanwhile.
    """
    from trainer.store.checkpoints import CheckpointStore
    from trainer.store.storage import open_storage

    run_dir = _run_of(place, run_root)
    keep = read_plan(run_dir).spec.checkpoint if run_dir is not None else None
    if keep_last is None and keep is None:
        raise UsageError("a checkpoint place does not say how many to keep", "add --keep-last N")
    keep_last = keep_last if keep_last is not None else (keep.keep_last if keep else 2)
    keep_every = keep_every if keep_every is not None else (keep.keep_every if keep else None)
    if keep_last < 2:
        raise UsageError(
            f"--keep-last {keep_last}: at least 2 are kept, so that one can be damaged", "give 2"
        )
    if keep_every is not None and keep_every < 1:
        raise UsageError(f"--keep-every {keep_every}: is no number of steps", "give 1 or more")
    uri, options = checkpoint_place(place, run_root)
    store = CheckpointStore.existing(open_storage(uri, options))
    before = store.survey()
    try:
        removal = store.prune(keep_last=keep_last, keep_every=keep_every)
    except Fenced as err:
        raise StorageError(
            f"{uri}: a new attempt started, and deleting ended there", "run it again"
        ) from err
    sizes = {ref.step: ref.manifest.size_bytes for ref in before.complete}
    torn = {one.step for one in before.torn} - {one.step for one in store.survey().torn}
    return {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "removed": sorted(removal.steps),
        "freed_bytes": sum(sizes.get(step, 0) for step in removal.steps),
        "leftovers": sorted(torn),
        "warnings": list(removal.warnings),
    }


def prune_lines(pruned: dict[str, Any]) -> list[str]:
    """What `vitra checkpoints --prune` did."""
    lines = [f"removed step {step:>8}" for step in pruned["removed"]]
    lines += [f"removed step {step:>8}: only left-over files" for step in pruned["leftovers"]]
    every = "" if pruned["keep_every"] is None else f" and each multiple of {pruned['keep_every']}"
    freed = f"{size_text(pruned['freed_bytes'])} freed" if lines else "nothing to remove"
    lines.append(f"{freed}; kept are the newest {pruned['keep_last']}{every}")
    return [*lines, *(f"WARNING: {warning}" for warning in pruned["warnings"])]


def _row(step: int, attempt: int | None, reason: str) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "reason": reason}


def checkpoint_place(place: str, run_root: Path) -> tuple[str, dict[str, Any]]:
    """The URI that RUN|URI means, and the storage options that go with it.

    Raises:
        NotFound: neither a run nor a place with checkpoints.
    """
    run_dir = _run_of(place, run_root)
    if run_dir is None:
        return place, {}
    planned = read_plan(run_dir)
    return planned.checkpoint_uri, planned.spec.checkpoint.storage_options


def _run_of(place: str, run_root: Path) -> RunDir | None:
    """The run that `place` means; None where it is a checkpoint place by itself."""
    if "://" in place or (Path(place) / "owner.json").is_file():
        return None
    try:
        return find_run(place, run_root)
    except NotFound as err:
        if Path(place).is_dir():
            raise NotFound(
                f"{place}: neither a run nor a checkpoint place (no run.json, no owner.json)"
            ) from err
        raise
