"""The weights of a checkpoint as one file: chosen and checked here, written by the trainer."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.ask import ask_trainer
from launcher.checkpoints import checkpoint_place
from launcher.environment import without_stale
from launcher.registry import absolute
from launcher.wording import size_text
from trainer.spec import errors
from trainer.spec.rundir import sync_directory

if TYPE_CHECKING:
    from trainer.store.checkpoints import CheckpointRef, CheckpointStore

#: Terabytes from a slow file system take their time; hanging for ever is no option.
_TIMEOUT_S = 86400.0


def export_weights(
    place: str,
    run_root: Path,
    to: str,
    *,
    step: int | None,
    force: bool,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write the model of one checkpoint of `place` (a run or a URI) to the file `to`.

    `step` None is the newest complete checkpoint. Every byte of it is checked first. The file is
    there only when it is whole; the same weights give the same bytes, whatever the run.

    Returns file, run_id, step, attempt, tensors (how many) and size_bytes.

    Raises:
        UsageError: `to` cannot be written, or is there and `force` is not given.
        NotFound: no such run, place or checkpoint.
        CheckpointError: the checkpoint is damaged; storage or disk failed.
    """
    from trainer.store.checkpoints import CheckpointStore
    from trainer.store.storage import open_storage

    target = _target(to, force=force)
    uri, options = checkpoint_place(place, run_root)
    store = CheckpointStore.existing(open_storage(uri, options))
    ref = _choose(store, step)
    say(f"checking every byte of step {ref.step}")
    problems = store.verify(ref)
    if problems and not store.is_current(ref):
        raise errors.StorageError(
            f"{uri}: step {ref.step} was deleted or replaced while it was read",
            "the run goes on saving: try again",
        )
    if problems:
        raise errors.CorruptCheckpoint(
            f"{uri}: step {ref.step} is damaged: {'; '.join(problems)}", _others(store, ref.step)
        )
    unfinished = target.with_name(f".{target.name[:200]}.{os.getpid()}-{secrets.token_hex(4)}")
    request = {
        "uri": uri,
        "storage_options": options,
        "manifest": ref.manifest.to_bytes().decode(),
        "file": str(unfinished),
    }
    say(f"writing {target}")
    try:
        written = _ask_trainer(request, environ)
        unfinished.replace(target)
        sync_directory(target.parent)
    except OSError as err:
        raise errors.StorageError(f"cannot write {target}: {err.strerror}") from err
    finally:
        unfinished.unlink(missing_ok=True)
    return {
        "file": str(target),
        "run_id": store.run_id,
        "step": ref.step,
        "attempt": ref.attempt,
        "tensors": written["tensors"],
        "size_bytes": written["size_bytes"],
    }


def export_lines(facts: Mapping[str, Any]) -> list[str]:
    """`vitra export`."""
    return [
        f"{facts['file']}: {facts['tensors']} tensors of step {facts['step']}, "
        f"{size_text(facts['size_bytes'])}"
    ]


def _target(to: str, *, force: bool) -> Path:
    if not to.strip():
        raise errors.UsageError("--to is empty", "name a file, such as weights.safetensors")
    path = absolute(to)
    if path.is_dir():
        raise errors.UsageError(f"--to {to} is a directory", "name a file in it")
    if not path.parent.is_dir():
        raise errors.UsageError(f"--to {to}: there is no directory {path.parent}", "make it first")
    if os.path.lexists(path) and not force:
        raise errors.UsageError(f"--to {to}: is there already", "add --force to replace it")
    return path


def _choose(store: CheckpointStore, step: int | None) -> CheckpointRef:
    survey = store.survey()
    found = next((r for r in survey.complete if step is None or r.step == step), None)
    if found is not None:
        return found
    for one in survey.damaged:
        if step in (None, one.step):
            raise errors.CorruptCheckpoint(
                f"{store.storage.uri}: step {one.step} is damaged: {one.reason}",
                _others(store, one.step),
            )
    if step is None:
        raise errors.NotFound(
            f"{store.storage.uri}: run {store.run_id} has no complete checkpoint yet"
        )
    raise errors.NotFound(
        f"{store.storage.uri}: no checkpoint of step {step}", _others(store, step)
    )


def _others(store: CheckpointStore, step: int) -> str:
    steps = sorted(ref.step for ref in store.survey().complete if ref.step != step)
    return f"there is step {', '.join(map(str, steps))}" if steps else "there is no other"


def _ask_trainer(request: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """Have a trainer process, which has torch, write the file; returns what it says of it.

    Raises:
        VitraError: what the trainer met, or that it came to no answer.
    """
    result = ask_trainer(
        "export",
        json.dumps(request).encode(),
        environ=without_stale(environ),
        timeout_s=_TIMEOUT_S,
        doing="writing the weights",
    )
    if "error" in result:
        raise getattr(errors, result["error"])(result["message"], result["hint"])
    return result
