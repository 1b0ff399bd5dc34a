"""Saving and restoring a run's whole state, on all ranks together."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.agree import Agreement
from trainer.checkpoint.background import BackgroundSave, Warn, persist, pieces
from trainer.checkpoint.codec import (
    HostBuffer,
    index_file,
    parse_index,
    save_tensors,
    stage_tensors,
    tensor_shapes,
)
from trainer.checkpoint.spread import load_spread
from trainer.optim import check_same_groups
from trainer.records import RunRecords
from trainer.spec.errors import (
    CheckpointError,
    CorruptCheckpoint,
    Fenced,
    IncompatibleCheckpoint,
    NonFiniteLoss,
    StorageError,
    VitraError,
)
from trainer.spec.plan import Plan
from trainer.spec.pulse import Phase
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import utc_now
from trainer.state import TrainState
from trainer.store.checkpoints import CheckpointRef, CheckpointStore
from trainer.store.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    FileEntry,
    index_name,
    shard_name,
)
from trainer.store.storage import open_storage
from trainer.watchdog import Pulse

if TYPE_CHECKING:
    from trainer.strategies.base import TrainingStrategy

log = logging.getLogger(__name__)

_MODEL = "model."
_OPTIMIZER = "optimizer."
#: A run may miss this many saves in a row; then it is better stopped than trained for nothing.
_MAX_FAILED_SAVES = 2
#: What a rank with an error in its hands still waits for a save.
_LAST_WAIT_S = 20.0


class Checkpointer:
    """One rank's hand on the run's checkpoints.

    All methods are collective, except where they say that they are not.

    Args:
        store: the checkpoint place.
        group: a gloo group over all ranks; None where there is one process only.
        background: agreements of saves in the background, on a gloo group of their own; None: every
            save is finished before training goes on.
        pinned: the state is on a GPU.
    """

    def __init__(
        self,
        store: CheckpointStore,
        *,
        plan: Plan,
        ranks: RankInfo,
        agree: Agreement,
        group: dist.ProcessGroup | None,
        records: RunRecords,
        pulse: Pulse,
        background: Agreement | None = None,
        pinned: bool = False,
    ) -> None:
        self._store = store
        self._plan = plan
        self._ranks = ranks
        self._agree = agree
        self._group = group
        self._records = records
        self._pulse = pulse
        self._background = background
        self._buffer = HostBuffer(pinned=pinned)
        self._in_flight: BackgroundSave | None = None
        self._failed_saves = 0
        self._resumed_step: int | None = None
        self.saved_step: int | None = None

    def warm(self, strategy: TrainingStrategy) -> None:
        """Make the memory ready that saves in the background copy this rank's part into."""
        if self._background is not None:
            self._buffer.warm(_staged_bytes(strategy, self._ranks.world_size))

    def save(
        self,
        strategy: TrainingStrategy,
        state: TrainState,
        *,
        must_succeed: bool,
        only_trainable: bool = False,
    ) -> bool:
        """Save a checkpoint of the present step; False if that failed already.

        With `must_succeed`, and where nothing is done in the background, it is durable when this
        returns. Else it is staged, and training may go on; `finish`, or the next save, waits for
        it. With `only_trainable` it leaves out the weights that no optimizer group has: whoever
        resumes from it keeps those that the model has by then.

        A periodic save that fails is a loud warning, and the second in a row ends the run, which
        may be told by the next save; the newest good checkpoint stays valid throughout.

        Raises:
            Fenced: a newer attempt owns the run.
            NonFiniteLoss: the step left a parameter that is not finite; nothing was saved.
            CheckpointError: it failed and had to succeed.
        """
        self._pulse.reached(Phase.SAVING, state.step)
        self.finish()
        try:
            self._agree_or_raise(self._look_for_newer_attempt)
            if self._background is not None and not must_succeed:
                self._start(strategy, state, only_trainable, self._background)
                return True
            self._save(strategy, state, only_trainable)
        except StorageError as err:
            self._note_failure(state.step, err, must_succeed=must_succeed)
            return False
        self._note_success(state.step)
        return True

    def tell(self) -> None:
        """Say loudly what goes wrong with this rank's part of a save in flight. Not collective.

        At a step's end, so that the log has it between two steps, whenever it came about.
        """
        if self._in_flight is not None:
            for warning in self._in_flight.warnings():
                log.warning("%s", warning)

    def finish(self) -> bool:
        """Wait until no save is in flight any more; False if the one that was has failed.

        Raises as `save` does.
        """
        if self._in_flight is None:
            return True
        error = self._in_flight.wait()
        self.tell()
        flight, self._in_flight = self._in_flight, None
        if isinstance(error, StorageError):
            self._note_failure(flight.step, error, must_succeed=False)
            return False
        if error is not None:
            raise error
        self._note_success(flight.step)
        return True

    def leave(self, _exit_code: int) -> None:
        """Let a save in flight end, for some seconds, before this rank ends. Not collective.

        The steps up to it are not lost to an error in a later one: that rank's shard is still
        written, and the others, who wait for it in their next step, commit it.
        """
        flight = self._in_flight
        if flight is None or flight.is_over(0.0):
            return
        log.info("waiting for the save of step %d, at most %g s", flight.step, _LAST_WAIT_S)
        self._pulse.reached(Phase.SAVING, flight.step)
        if not flight.is_over(_LAST_WAIT_S):
            log.warning("step %d is not saved yet, and may never be", flight.step)
        self.tell()

    def _note_success(self, step: int) -> None:
        self._failed_saves = 0
        self.saved_step = step

    def _note_failure(self, step: int, error: StorageError, *, must_succeed: bool) -> None:
        """Clean up after a save that failed on all ranks, and raise where that ends the run."""
        self._failed_saves += 1
        reason = str(error)
        # All ranks are past their writes: what they left of this save is only in the way.
        self._agree_or_raise(lambda: self._clean_up_failed(step, reason))
        if must_succeed or self._failed_saves >= _MAX_FAILED_SAVES:
            raise error
        log.warning("step %d NOT saved, training goes on: %s", step, error)

    def restore(self, strategy: TrainingStrategy, state: TrainState) -> None:
        """Restore the newest good checkpoint into model, optimizer, schedule and `state`.

        Every byte is checked against its digest first, the ranks sharing the work; a damaged
        checkpoint is passed over with its reason. Leaves everything as it is where no checkpoint
        was ever committed.

        Raises:
            CorruptCheckpoint: checkpoints were committed once and none is good, or the newest good
                one does not hold the whole state.
            IncompatibleCheckpoint: the newest good one is of another model.
        """
        found = self._agree.from_primary(self._on_primary(self._find))
        candidates: list[CheckpointRef] = found[0]
        must_resume: bool = found[1]
        reasons: list[str] = []
        for ref in candidates:
            problems = self._verify(self._store, ref)
            if not problems:
                self._load(self._store, ref, strategy, weights=True)
                state.step = ref.step
                state.epoch = ref.manifest.epoch
                state.samples_seen = ref.manifest.samples_seen
                self._resumed_step = ref.step
                self._records.event("restored", step=ref.step, from_attempt=ref.attempt)
                return
            reasons.append(f"step {ref.step}: {problems[0]}")
            log.warning("checkpoint of step %d passed over: %s", ref.step, "; ".join(problems))
            self._records.event("checkpoint_skipped", step=ref.step, reason="; ".join(problems))
        if must_resume:
            raise CorruptCheckpoint(
                "this run has committed checkpoints, but none is good: "
                + ("; ".join(reasons) or "all are gone"),
                "restore the files, or submit a new run to start from the beginning",
            )

    def load_from(self, directory: Path, strategy: TrainingStrategy) -> None:
        """Restore optimizer and schedule, not the weights, from one step's directory (`step-...`).

        Raises:
            CorruptCheckpoint: it is missing or damaged. IncompatibleCheckpoint: of another model.
        """
        try:
            manifest = CheckpointManifest.from_bytes((directory / MANIFEST_NAME).read_bytes())
        except OSError as err:
            raise CorruptCheckpoint(
                f"{directory}: no readable {MANIFEST_NAME}: {err.strerror}"
            ) from err
        except CorruptCheckpoint as err:
            raise CorruptCheckpoint(f"{directory}: {err.message}", err.hint) from err
        store = CheckpointStore(open_storage(str(directory.parent)), manifest.run_id)
        ref = CheckpointRef(manifest)
        problems = self._verify(store, ref)
        if problems:
            raise CorruptCheckpoint(f"{directory}: {'; '.join(problems)}")
        self._load(store, ref, strategy, weights=False)

    def _find(self) -> tuple[list[CheckpointRef], bool]:
        """(what this attempt may go on from, best first; whether it has to).

        The claim decided whether there is anything to go on from, and refused where all was
        damaged.
        """
        claim = next((c for c in self._store.claims() if c.attempt == self._ranks.attempt), None)
        if claim is None:
            raise CheckpointError(
                f"{self._store.storage.uri}: attempt {self._ranks.attempt} was never claimed here"
            )
        return self._store.candidates(claim), claim.resume is not None

    def _verify(self, store: CheckpointStore, ref: CheckpointRef) -> list[str]:
        """What is wrong with a checkpoint, in words, on every rank; each reads its share of it."""
        names = [entry.name for entry in ref.manifest.files]
        mine = names[self._ranks.rank :: self._ranks.world_size]
        problems: list[str] = []
        self._agree_or_raise(lambda: problems.extend(store.verify(ref, mine) if mine else []))
        return [problem for of_rank in self._agree.gather(problems) for problem in of_rank]

    def _load(
        self,
        store: CheckpointStore,
        ref: CheckpointRef,
        strategy: TrainingStrategy,
        *,
        weights: bool,
    ) -> None:
        """Fill optimizer, schedule and, with `weights`, the model from a verified checkpoint."""
        files = {entry.name: entry.size_bytes for entry in ref.manifest.files}
        document = store.storage.read(ref.path(index_file(files)))
        try:
            index, saved = parse_index(document, files)
        except CorruptCheckpoint as err:
            raise CorruptCheckpoint(f"checkpoint of step {ref.step}: {err.message}") from err
        shapes = tensor_shapes(index)
        optimizer, schedule = strategy.optimizer, strategy.lr_scheduler
        assert optimizer is not None, "run_setup comes before a restore"
        assert schedule is not None
        groups, position = saved.get("optimizer_groups"), saved.get("schedule")
        # Going on from a part of the state would train, and train something else.
        if not (isinstance(groups, dict) and isinstance(position, dict)) or not any(
            name.startswith(_OPTIMIZER) for name in shapes
        ):
            raise CorruptCheckpoint(
                f"the checkpoint of step {ref.step} lacks the state of optimizer or schedule",
                "to start from its weights alone, name it as checkpoint.init_from of a new run",
            )
        check_same_groups(optimizer, groups)

        tensors: dict[str, Tensor] = {}
        if weights:
            left_out = strategy.untrained() if saved.get("only_trainable") else frozenset()
            tensors |= _weights_of(strategy, left_out)
            _check_same_tensors({n: t for n, t in shapes.items() if n.startswith(_MODEL)}, tensors)
        moments = _empty_moments(strategy, shapes)
        tensors |= {
            f"{_OPTIMIZER}{name}.{key}": tensor
            for name, entry in moments.items()
            for key, tensor in entry.items()
        }
        load_spread(
            tensors,
            index,
            read=lambda name, start, target: store.storage.read_into(ref.path(name), start, target),
            group=self._group,
        )
        parameters = dict(strategy.named_parameters())
        optimizer.state.clear()
        for name, entry in moments.items():
            optimizer.state[parameters[name]] = entry
        schedule.load_state_dict(position)

    def _ready(self, strategy: TrainingStrategy, step: int) -> None:
        """Collective: whether the state may be saved, and the records up to it are durable."""

        def ready() -> None:
            _check_finite(strategy, step)
            self._records.sync()

        self._agree_or_raise(ready)

    def _start(
        self,
        strategy: TrainingStrategy,
        state: TrainState,
        only_trainable: bool,
        background: Agreement,
    ) -> None:
        """Stage the present state, and have it written and committed in the background."""
        attempt, name = self._ranks.attempt, shard_name(self._ranks.attempt, self._ranks.rank)
        self._ready(strategy, state.step)
        tensors = _tensors_of(strategy, strategy.untrained() if only_trainable else frozenset())
        self._pulse.mark()
        staged = stage_tensors(tensors, shard_name=name, buffer=self._buffer, group=self._group)
        document = _state_document(strategy) | {"only_trainable": only_trainable}
        then = replace(state)

        def create(data: memoryview) -> FileEntry:
            return self._store.create_file(then.step, name, pieces(data))

        def write(warn: Warn) -> None:
            entries: list[FileEntry] = []

            def upload() -> None:
                if (data := staged.data) is not None:
                    what = f"step {then.step}"
                    entries.append(persist(lambda: create(data), what=what, warn=warn))

            self._agree_or_raise(upload, background)
            written = background.gather(entries)

            def commit() -> None:
                names = {
                    shard_name(attempt, rank): entry.name
                    for rank, of_rank in enumerate(written)
                    for entry in of_rank
                }
                index = staged.index_of(names) | {"state": document}
                self._commit(then, index, [entry for of_rank in written for entry in of_rank])

            self._agree_or_raise(commit if self._ranks.is_primary else lambda: None, background)

        self._in_flight = BackgroundSave(then.step, write)

    def _save(self, strategy: TrainingStrategy, state: TrainState, only_trainable: bool) -> None:
        attempt = self._ranks.attempt
        self._ready(strategy, state.step)
        tensors = _tensors_of(strategy, strategy.untrained() if only_trainable else frozenset())
        self._pulse.mark()
        written = save_tensors(
            tensors,
            shard_name=shard_name(attempt, self._ranks.rank),
            create=lambda name, parts: self._store.create_file(state.step, name, parts),
            group=self._group,
            written=self._pulse.mark,
        )

        def commit() -> None:
            assert written is not None, "rank 0 holds the index"
            index, entries = written
            document = _state_document(strategy) | {"only_trainable": only_trainable}
            self._commit(state, index | {"state": document}, entries)

        self._agree_or_raise(commit if self._ranks.is_primary else lambda: None)

    def _commit(self, state: TrainState, index: dict[str, Any], shards: list[FileEntry]) -> None:
        """On rank 0, once every shard is written: make them a checkpoint, and retire old ones."""
        attempt = self._ranks.attempt
        content = [json.dumps(index).encode()]
        entry = self._store.create_file(state.step, index_name(attempt), content)
        left_over = self._store.commit(
            CheckpointManifest(
                run_id=self._ranks.run_id,
                step=state.step,
                epoch=state.epoch,
                samples_seen=state.samples_seen,
                attempt=attempt,
                world_size=self._plan.world_size,
                strategy=self._plan.spec.train.strategy,
                spec_digest=self._plan.spec_digest,
                files=(*shards, entry),
                created_at=utc_now(),
            )
        )
        self._records.event("saved", step=state.step)
        for warning in (*left_over, *self._retire()):
            log.warning("old files could not be deleted: %s", warning)

    def _look_for_newer_attempt(self) -> None:
        if self._ranks.is_primary and self._store.newest_attempt() > self._ranks.attempt:
            raise Fenced("a newer attempt owns this run", "nothing to do: the newer one goes on")

    def _retire(self) -> tuple[str, ...]:
        """Delete what retention no longer keeps; returns what could not be deleted, in words.

        The checkpoint before it is committed, so a storage that fails here is no failed save.
        """
        keep = self._plan.spec.checkpoint
        try:
            return self._store.retain(
                self._ranks.attempt,
                keep_last=keep.keep_last,
                keep_every=keep.keep_every,
                resumed_step=self._resumed_step,
            ).warnings
        except StorageError as err:
            return (str(err),)

    def _clean_up_failed(self, step: int, reason: str) -> None:
        """Record a failed save and remove what it left. A disk that is full fails here as well."""
        if not self._ranks.is_primary:
            return
        try:
            self._records.event("save_failed", step=step, reason=reason)
            self._store.discard(step, self._ranks.attempt)
        except (OSError, StorageError) as err:
            log.warning("the failed save of step %d could not be cleaned up: %s", step, err)

    def _on_primary(self, call: Callable[[], Any]) -> Any:
        """`call()` on rank 0 and None elsewhere; its error, if any, on every rank."""
        result: list[Any] = [None]

        def run() -> None:
            if self._ranks.is_primary:
                result[0] = call()

        self._agree_or_raise(run)
        return result[0]

    def _agree_or_raise(self, call: Callable[[], None], agree: Agreement | None = None) -> None:
        """Run `call` on every rank; if it fails on some, the lowest one's error is raised on all.

        The same error everywhere, because the ranks must also go on alike. `agree` is for what is
        not on the training's thread.
        """
        error: VitraError | None = None
        try:
            call()
        except VitraError as err:
            error = err
        except OSError as err:
            error = StorageError(f"rank {self._ranks.rank}: {err}")
        agree = agree or self._agree
        if not agree.any(error is not None):
            return
        errors = agree.gather(error and (type(error), error.message, error.hint))
        kind, message, hint = next(one for one in errors if one is not None)
        raise kind(message, hint) from error


def _check_finite(strategy: TrainingStrategy, step: int) -> None:
    """Raises NonFiniteLoss where a parameter is not finite: a resume could only go on from that.

    Buffers are left alone; a mask may well be infinite.
    """
    for name, parameter in strategy.named_parameters():
        held = parameter.detach()
        held = held.to_local() if isinstance(held, DTensor) else held
        if not bool(held.isfinite().all()):
            raise NonFiniteLoss(
                f"step {step} left {name} not finite; not saved",
                "the newest checkpoint is that of an earlier step; lower the learning rate",
            )


def _weights_of(strategy: TrainingStrategy, left_out: Collection[str]) -> dict[str, Tensor]:
    """Parameters and buffers under the names that they have in a checkpoint."""
    state = strategy.named_state().items()
    return {_MODEL + name: tensor for name, tensor in state if name not in left_out}


def _staged_bytes(strategy: TrainingStrategy, world_size: int) -> int:
    """About how many bytes of the state one rank saves: weights, and two moments of each trained.

    More than it is, as a rule: what all ranks hold is shared out to them by whole tensors.
    """
    alone = shared = 0
    for _, parameter in strategy.named_parameters():
        held = 3 if parameter.requires_grad else 1
        if isinstance(parameter, DTensor):
            alone += held * parameter.to_local().nbytes
        else:
            shared += held * parameter.nbytes
    return alone + (shared if world_size == 1 else round(1.25 * shared / world_size))


def _tensors_of(strategy: TrainingStrategy, left_out: Collection[str]) -> dict[str, Tensor]:
    """Model and optimizer state under flat names: the live tensors."""
    assert strategy.optimizer is not None
    tensors = _weights_of(strategy, left_out)
    for name, parameter in strategy.named_parameters():
        for key, value in strategy.optimizer.state.get(parameter, {}).items():
            assert isinstance(value, Tensor), f"optimizer state {name}.{key} is no tensor"
            tensors[f"{_OPTIMIZER}{name}.{key}"] = value
    return tensors


def _state_document(strategy: TrainingStrategy) -> dict[str, Any]:
    """What a checkpoint holds beside tensors; JSON, for people too."""
    assert strategy.optimizer is not None
    assert strategy.lr_scheduler is not None
    return {
        "schedule": strategy.lr_scheduler.state_dict(),
        "optimizer_groups": {
            g["name"]: g["parameter_names"] for g in strategy.optimizer.param_groups
        },
        # The streams of keyed randomness are promised per numpy version.
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }


def _empty_moments(
    strategy: TrainingStrategy, shapes: dict[str, tuple[torch.Size, torch.dtype]]
) -> dict[str, dict[str, Tensor]]:
    """Room for the optimizer state that the checkpoint has, parameter by parameter.

    A parameter that was never stepped (a frozen backbone) has none, in the checkpoint as here.
    """
    parameters = dict(strategy.named_parameters())
    moments: dict[str, dict[str, Tensor]] = {}
    for full_name, (shape, dtype) in shapes.items():
        if not full_name.startswith(_OPTIMIZER):
            continue
        name, _, key = full_name.removeprefix(_OPTIMIZER).rpartition(".")
        if name not in parameters:
            raise IncompatibleCheckpoint(
                f"the checkpoint has optimizer state for {name!r}, which this model has not"
            )
        like = parameters[name].detach()
        # zeros_like keeps the layout of a sharded parameter; the step counter is a plain scalar.
        moments.setdefault(name, {})[key] = (
            torch.zeros_like(like, dtype=dtype)
            if shape == like.shape and shape
            else torch.zeros(shape, dtype=dtype, device=like.device)
        )
    return moments


def _check_same_tensors(
    saved: dict[str, tuple[torch.Size, torch.dtype]], present: dict[str, Tensor]
) -> None:
    problems = [
        f"{name} is missing in the checkpoint" for name in sorted(present.keys() - saved.keys())
    ]
    problems += [f"{name} is not in this model" for name in sorted(saved.keys() - present.keys())]
    for name in sorted(saved.keys() & present.keys()):
        shape, dtype = saved[name]
        if shape != present[name].shape or dtype != present[name].dtype:
            problems.append(
                f"{name} is {tuple(shape)} {dtype} in the checkpoint and "
                f"{tuple(present[name].shape)} {present[name].dtype} in this model"
            )
    if problems:
        raise IncompatibleCheckpoint(
            "; ".join(problem.replace(_MODEL, "") for problem in problems[:5])
            + (f"; and {len(problems) - 5} more" if len(problems) > 5 else ""),
            "resume with the model options that the run was started with",
        )
