"""The checkpoints of one run at one place: claim, write, commit, find, verify, delete.

    owner.json                     the run that the place belongs to
    attempt-<K>.json               attempt K's claim: from which checkpoint it goes on (lineage.py)
    step-<8 digits>/               one checkpoint, or what is left of an attempt at one
        shard-a<K>-r<rank>.bin     written by attempt K, never by another, never again
        manifest.json              written last: without it the directory means nothing

Everything here may be killed between any two writes, and any two processes may be at it at once: a
rank on a node that was cut off, a user who prunes. What holds at every instant:

- A manifest is there only while every file that it lists is there: it comes after them and goes
  before them.
- No attempt writes a name that another attempt writes, manifest.json excepted.
- Only what a manifest of this run names, and files named like an older attempt's, is ever deleted;
  before each deletion the deleter looks whether a newer attempt has taken over.

Free of torch, so that the launcher can use it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Self

from pydantic import ValidationError

from trainer.spec.errors import CheckpointError, CorruptCheckpoint, Fenced, NotFound, StorageError
from trainer.spec.plan import Plan
from trainer.store.lineage import (
    Claim,
    claim_name,
    claimed_attempt,
    newest_claim,
    rank_of,
    why_ignored,
)
from trainer.store.manifest import (
    MANIFEST_NAME,
    CheckpointManifest,
    Digest,
    FileEntry,
    attempt_of,
)
from trainer.store.storage import Chunk, Storage, flat, open_storage

OWNER_NAME = "owner.json"

_STEP_DIRECTORY = re.compile(r"step-([0-9]{8,})/")
#: How often a step that another process got in the way of starts again.
_TRIES = 100
#: How many unusable checkpoints an error message lists.
_LISTED = 8


def step_directory(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08d}"


def file_path(step: int, name: str) -> str:
    """The storage name of a file of the checkpoint of `step`."""
    return f"{step_directory(step)}/{name}"


@dataclass(frozen=True)
class CheckpointRef:
    """A checkpoint whose manifest is good."""

    manifest: CheckpointManifest

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def attempt(self) -> int:
        return self.manifest.attempt

    def path(self, name: str) -> str:
        """The storage name of one of its files."""
        return file_path(self.step, name)


@dataclass(frozen=True)
class Skipped:
    """A step directory that is no checkpoint to go on from. `attempt` is None where unknown."""

    step: int
    attempt: int | None
    reason: str


@dataclass(frozen=True)
class Survey:
    """Every step directory of a place, classified.

    Attributes:
        complete: what counts, best first (the newest attempt's, then the highest step). Sizes were
            looked at, digests were not.
        ignored: whole or not, no part of the run any more, by the rule of `lineage`, or never
            one; by step.
        damaged: a manifest is there but bad, or a file that it lists is missing or of another size.
        torn: no manifest; left by a killed save or deletion, or just being written.
        foreign: names in the place that are nothing of ours, and are left alone.
    """

    complete: tuple[CheckpointRef, ...]
    ignored: tuple[Skipped, ...]
    damaged: tuple[Skipped, ...]
    torn: tuple[Skipped, ...]
    foreign: tuple[str, ...]

    @property
    def newest(self) -> CheckpointRef | None:
        return self.complete[0] if self.complete else None

    @property
    def ever_committed(self) -> bool:
        """Whether a checkpoint of this run was committed here, even if none is good now.

        Ignored ones say nothing: an attempt that started afresh found nothing committed, and what
        a cut-off older attempt commits beside it later does not change that.
        """
        return bool(self.complete or self.damaged)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """All that is not complete, by step."""
        return tuple(_by_step((*self.ignored, *self.damaged, *self.torn)))


@dataclass(frozen=True)
class Removal:
    """What a deletion did: the steps removed, and what could not be deleted, in words."""

    steps: tuple[int, ...] = ()
    warnings: tuple[str, ...] = ()


def _utc_now() -> datetime:
    return datetime.now(UTC)


class CheckpointStore:
    """The checkpoints of the run `run_id` at `storage`.

    Remembers nothing but claims, which never change.

    Every method may raise StorageError when the storage fails; what was committed stays valid.
    """

    def __init__(
        self, storage: Storage, run_id: str, clock: Callable[[], datetime] = _utc_now
    ) -> None:
        self.storage = storage
        self.run_id = run_id
        self._clock = clock
        self._known_claims: dict[int, Claim] = {}

    @classmethod
    def of_plan(cls, plan: Plan, *, patience_s: float | None = None) -> Self:
        """The store of a planned run; `patience_s` as in `open_storage`.

        Raises:
            UsageError: its place is of an unusable kind.
        """
        options = plan.spec.checkpoint.storage_options
        storage = open_storage(plan.checkpoint_uri, options, patience_s=patience_s)
        return cls(storage, plan.run_id)

    @classmethod
    def existing(cls, storage: Storage) -> Self:
        """The store of whatever run owns the place. Raises NotFound if none does."""
        run_id = _owner(storage)
        if run_id is None:
            raise NotFound(
                f"{storage.uri}: no checkpoints here ({OWNER_NAME} is missing)",
                "give a run, or the checkpoint place of one",
            )
        return cls(storage, run_id)

    # -- Who may write here ------------------------------------------------------------------

    def own(self) -> None:
        """Take the place for this run, or confirm that it is this run's.

        Raises:
            CheckpointError: the place belongs to another run.
        """
        content = json.dumps({"run_id": self.run_id}).encode() + b"\n"
        if self.storage.claim(OWNER_NAME, content):
            return
        owner = self.owner()
        if owner != self.run_id:
            raise CheckpointError(
                f"{self.storage.uri}: holds the checkpoints of run {owner}, not of {self.run_id}",
                "give each run its own place: put {run_id} into checkpoint.uri",
            )

    def owner(self) -> str | None:
        """The run that owns the place; None if nobody does.

        Raises:
            CorruptCheckpoint: owner.json does not say.
        """
        return _owner(self.storage)

    def newest_attempt(self) -> int:
        """The highest claimed attempt; 0 if there is none. One listing."""
        return max(
            (number for name in self.storage.names() if (number := claimed_attempt(name))),
            default=0,
        )

    def claims(self) -> list[Claim]:
        """Every claim, by attempt.

        Raises:
            CorruptCheckpoint: a claim cannot be read; without it nothing says what counts.
        """
        numbers = filter(None, map(claimed_attempt, self.storage.names()))
        return [self._claim(number) for number in sorted(numbers)]

    def claim_next(
        self,
        job: str | None,
        restart: int | None,
        *,
        at_most_step: int | None = None,
        after_attempt: int = 0,
        ever_saved: bool = False,
    ) -> Claim:
        """Become the next attempt, resuming at most from the newest checkpoint that counts.

        From here on nothing that an older attempt still writes counts beyond that checkpoint.

        Args:
            job, restart: the scheduler's job and its restart count, for the record.
            at_most_step: go back to this step or an earlier one.
            after_attempt: attempts up to this number exist elsewhere (after a change of place).
            ever_saved: the run is known to have saved, whatever is found here.

        Raises:
            CorruptCheckpoint: checkpoints were committed, but none is usable. Nothing was claimed.
            NotFound: none is as early as `at_most_step`. Nothing was claimed.
        """
        for _ in range(_TRIES):
            claims = self.claims()
            survey = self._survey(claims)
            newest = next(
                (r for r in survey.complete if at_most_step is None or r.step <= at_most_step), None
            )
            if newest is None and survey.complete:
                steps = ", ".join(str(ref.step) for ref in survey.complete)
                raise NotFound(
                    f"{self.storage.uri}: no checkpoint at or before step {at_most_step}",
                    f"there is one at step {steps}",
                )
            if newest is None and (survey.ever_committed or ever_saved):
                raise self._none_usable(survey.skipped)
            claim = Claim(
                attempt=1 + max(after_attempt, *(one.attempt for one in claims), 0),
                resume=(newest.step, newest.attempt) if newest else None,
                job=job,
                restart=restart,
                claimed_at=self._clock().isoformat(timespec="milliseconds"),
            )
            content = claim.model_dump_json().encode() + b"\n"
            if self.storage.claim(claim_name(claim.attempt), content):
                return claim
            # Another process was faster. It may go on from a checkpoint that came after our look.
        raise CheckpointError(
            f"{self.storage.uri}: lost the race for the next attempt {_TRIES} times",
            "see what else starts this run over and over",
        )

    # -- Writing -----------------------------------------------------------------------------

    def create_file(self, step: int, name: str, chunks: Iterable[Chunk]) -> FileEntry:
        """Write one file of the checkpoint of `step`; whole and durable on return.

        `name` comes from `shard_name` or `index_name`. If this attempt has written that name
        already (the save is tried again) a suffix is added: the entry has the name really used.
        Memory: one chunk. The chunks must not change before this returns.

        Raises:
            Fenced: the write failed, and a newer attempt owns the run.
        """
        attempt = attempt_of(name)
        assert attempt is not None, name
        with self._fenced_rather_than_failed(attempt):
            return self._create_file(step, name, chunks)

    def _create_file(self, step: int, name: str, chunks: Iterable[Chunk]) -> FileEntry:
        stem, _, extension = name.rpartition(".")
        for number in range(1, _TRIES):
            actual = name if number == 1 else f"{stem}-t{number}.{extension}"
            digest = Digest()
            try:
                self.storage.create(file_path(step, actual), _digested(chunks, digest))
            except FileExistsError:
                continue
            return FileEntry(name=actual, size_bytes=digest.size_bytes, digest=digest.text)
        raise StorageError(
            f"{self.storage.uri}/{file_path(step, name)}: written {_TRIES - 1} times already"
        )

    def commit(self, manifest: CheckpointManifest) -> tuple[str, ...]:
        """Make the files listed a checkpoint. Called by one process, after all files are written.

        When this returns the checkpoint is durable and no newer attempt had claimed the run, so it
        counts. Takes the place of an older attempt's checkpoint of the same step in one step, then
        drops that one's files; returns warnings of what could not be dropped.

        Raises:
            Fenced: a newer attempt owns the run. If the manifest got there all the same, it does
                not count beyond where the newer attempt resumed.
            StorageError: a listed file is missing or has another size; nothing was committed.
        """
        assert manifest.run_id == self.run_id, manifest.run_id
        assert all(attempt_of(entry.name) == manifest.attempt for entry in manifest.files)
        self._refuse_if_fenced(manifest.attempt)
        with self._fenced_rather_than_failed(manifest.attempt):
            absent = self._absent(manifest)
            if absent:
                raise StorageError(
                    f"{self.storage.uri}/{step_directory(manifest.step)}: not committed: "
                    + "; ".join(absent[:_LISTED]),
                    "a rank did not finish its write, or something deletes files there",
                )
            self._put_manifest(manifest)
        self._refuse_if_fenced(manifest.attempt)
        attempts = range(manifest.attempt + 1)
        return (*self._drop_unlisted(manifest.step, attempts), *self._abort_uploads(attempts))

    def discard(self, step: int, attempt: int) -> tuple[str, ...]:
        """Remove what a failed save of this attempt left, once none of its ranks writes any more.

        A checkpoint of `step` that is committed is not touched. Returns warnings of what could not
        be removed.
        """
        mine = range(attempt, attempt + 1)
        return (*self._drop_unlisted(step, mine), *self._abort_uploads(mine))

    # -- Finding -----------------------------------------------------------------------------

    def survey(self) -> Survey:
        """Look at everything that is there now. Reads manifests and sizes, no shard."""
        return self._survey(self.claims())

    def candidates(self, claim: Claim) -> list[CheckpointRef]:
        """What the attempt of `claim` may go on from, best first. Sizes checked, digests not."""
        claims = [one for one in self.claims() if one.attempt < claim.attempt]
        complete = self._survey([*claims, claim]).complete
        return [ref for ref in complete if ref.attempt < claim.attempt]

    def verify(self, ref: CheckpointRef, names: Iterable[str] | None = None) -> list[str]:
        """Read files of a checkpoint, all or those named, against their digests.

        Returns what is wrong, in words; empty if every byte is right. Memory: a few MiB. A
        checkpoint that was deleted or replaced meanwhile has that one problem; `is_current` then
        tells it from damage.
        """
        wanted = None if names is None else set(names)
        problems: list[str] = []
        for entry in ref.manifest.files:
            if wanted is None or entry.name in wanted:
                problem = self._wrong(ref.step, entry)
                if problem:
                    problems.append(problem)
        if problems and not self.is_current(ref):
            return ["deleted or replaced while it was read"]
        return problems

    def is_current(self, ref: CheckpointRef) -> bool:
        """Whether the step's manifest is still this one."""
        return self._is_current(ref.manifest)

    def newest_good(
        self,
        claim: Claim | None = None,
        on_skip: Callable[[Skipped], None] | None = None,
        *,
        ever_saved: bool = False,
    ) -> CheckpointRef | None:
        """The best checkpoint with every byte right: for `claim`'s attempt, or for any reader.

        Reads every byte of each one that it tries. `on_skip` gets each that it passed over, with
        the reason. None means that the run never committed anything: a fresh start.

        Raises:
            CorruptCheckpoint: something was committed (or `ever_saved`), and none is good.
            Fenced: none is good for `claim`, and a newer attempt has taken over.
        """
        if claim is not None and claim.resume is None:
            return None  # decided when the claim was made; older attempts' late commits don't count
        claims = self.claims()
        if claim is not None:
            claims = [*(one for one in claims if one.attempt < claim.attempt), claim]
        survey = self._survey(claims)
        good: CheckpointRef | None = None
        damaged: list[Skipped] = []
        for ref in survey.complete:
            if claim is None or ref.attempt < claim.attempt:
                problems = self.verify(ref)
                if not problems:
                    good = ref
                    break
                damaged.append(Skipped(ref.step, ref.attempt, "; ".join(problems[:_LISTED])))
        if on_skip is not None:
            later = [one for one in survey.skipped if good is None or one.step > good.step]
            for one in _by_step([*damaged, *later]):
                on_skip(one)
        if good is None and (damaged or survey.damaged or claim is not None or ever_saved):
            with self._fenced_rather_than_failed(claim.attempt if claim else None):
                raise self._none_usable(_by_step([*damaged, *survey.skipped]))
        return good

    # -- Deleting ----------------------------------------------------------------------------

    def retain(
        self, attempt: int, *, keep_last: int, keep_every: int | None, resumed_step: int | None
    ) -> Removal:
        """Delete old checkpoints, in the name of the running attempt.

        Keeps the `keep_last` newest complete ones of those that this attempt stands on: its own,
        and older attempts' up to `resumed_step`, the step it really went on from (None: it started
        afresh); and of those each whose step `keep_every` divides. Nothing at all is deleted while
        fewer than `keep_last` are complete, nor anything at or beyond the newest of them. So the
        point this attempt resumed from stays until `keep_last` newer ones are there, and what a
        return to an earlier step left behind stays until training has passed it again.

        A deletion that fails is a warning in the result.

        Raises:
            Fenced: a newer attempt has taken over; deleted no further.
        """
        stands_on = [
            ref
            for ref in self._counting(self.claims())
            if ref.attempt == attempt
            or (resumed_step is not None and ref.attempt < attempt and ref.step <= resumed_step)
        ]
        return self._retain(
            attempt, stands_on, keep_last, keep_every, lambda ref: not self._absent(ref.manifest)
        )

    def prune(self, *, keep_last: int, keep_every: int | None) -> Removal:
        """Delete old checkpoints and older attempts' leftovers, in a user's name.

        Like `retain` and `sweep`, but trusts nothing that it has not read: the `keep_last`
        newest ones that it keeps are good byte for byte. Safe beside a running attempt.
        """
        attempt = self.newest_attempt()
        removal = self._retain(
            attempt,
            self._counting(self.claims()),
            keep_last,
            keep_every,
            lambda ref: not self.verify(ref),
        )
        swept = self.sweep(attempt)
        return Removal(removal.steps, (*removal.warnings, *swept.warnings))

    def sweep(self, attempt: int) -> Removal:
        """Remove what attempts older than `attempt` left unfinished.

        That is files named like theirs which no manifest lists, what is left of interrupted writes
        and uploads, and step directories that are then empty. Foreign files stay; so does
        everything beside a manifest that cannot be read. `steps` are the directories that went
        away.

        Raises:
            Fenced: an attempt newer than `attempt` has taken over; swept no further.
        """
        self._refuse_if_fenced(attempt)
        self.storage.discard_leftovers()
        steps: list[int] = []
        warnings: list[str] = [*self._abort_uploads(range(attempt))]
        for step in self._steps():
            self._refuse_if_fenced(attempt)
            warnings += self._drop_unlisted(step, range(attempt))
            try:
                self.storage.discard_leftovers(step_directory(step))
                if self.storage.remove_empty_dir(step_directory(step)):
                    steps.append(step)
            except StorageError as err:
                warnings.append(str(err))
        return Removal(tuple(steps), tuple(warnings))

    # -- Parts -------------------------------------------------------------------------------

    def _claim(self, attempt: int) -> Claim:
        if attempt not in self._known_claims:
            self._known_claims[attempt] = self._read_claim(attempt)
        return self._known_claims[attempt]

    def _read_claim(self, attempt: int) -> Claim:
        name = claim_name(attempt)
        problem = f"{self.storage.uri}/{name}: not a claim that can be read"
        hint = "restore it: without it nothing says which checkpoints count"
        try:
            content = json.loads(self.storage.read(name))
            # The number is in the name; a claim that contradicts it is not to be trusted.
            claim = Claim.model_validate({"attempt": attempt, **content})
        except FileNotFoundError as err:
            raise CorruptCheckpoint(f"{problem}: it vanished", hint) from err
        except (ValueError, TypeError, RecursionError, ValidationError) as err:
            raise CorruptCheckpoint(f"{problem}: {_in_a_line(err)}", hint) from err
        if claim.attempt != attempt:
            raise CorruptCheckpoint(f"{problem}: it says attempt {claim.attempt}", hint)
        return claim

    def _refuse_if_fenced(self, attempt: int) -> None:
        newest = self.newest_attempt()
        if newest > attempt:
            raise Fenced(
                f"{self.storage.uri}: attempt {newest} of run {self.run_id} has taken over "
                f"from attempt {attempt}"
            )

    @contextmanager
    def _fenced_rather_than_failed(self, attempt: int | None) -> Iterator[None]:
        """A newer attempt sweeps and deletes: what an older one misses then is no fault."""
        try:
            yield
        except (StorageError, CorruptCheckpoint):
            if attempt is not None:
                self._refuse_if_fenced(attempt)
            raise

    def _put_manifest(self, manifest: CheckpointManifest) -> None:
        name, content = file_path(manifest.step, MANIFEST_NAME), manifest.to_bytes()
        for _ in range(_TRIES):
            try:
                there = self.storage.read(name)
            except FileNotFoundError:
                # Exclusive, so that of two attempts that found nothing the older cannot win last.
                if self.storage.claim(name, content):
                    return
                continue
            try:
                other = CheckpointManifest.from_bytes(there)
            except CorruptCheckpoint:
                other = None
            if other is not None and other.run_id != self.run_id:
                raise CheckpointError(
                    f"{self.storage.uri}/{name}: belongs to run {other.run_id}, not {self.run_id}",
                    "give each run its own place: put {run_id} into checkpoint.uri",
                )
            if other is not None and other.attempt > manifest.attempt:
                raise Fenced(
                    f"{self.storage.uri}/{name}: attempt {other.attempt} has committed it, "
                    f"attempt {manifest.attempt} must not"
                )
            if self.storage.replace(name, content, expected=there):
                return
        raise StorageError(
            f"{self.storage.uri}/{name}: changed {_TRIES} times while it was being replaced"
        )

    def _steps(self) -> list[int]:
        """The steps that have a directory, by number. Says nothing about checkpoints."""
        found = map(_step_of, self.storage.names())
        return sorted(step for step in found if step is not None)

    def _manifest(self, step: int) -> CheckpointManifest | None:
        """The step's manifest; None if there is none. Raises CorruptCheckpoint, in a few words."""
        try:
            data = self.storage.read(file_path(step, MANIFEST_NAME))
        except FileNotFoundError:
            return None
        manifest = CheckpointManifest.from_bytes(data)
        if manifest.step != step:
            raise CorruptCheckpoint(f"the manifest is that of step {manifest.step}")
        return manifest

    def _manifests(self) -> Iterator[CheckpointManifest]:
        """The good manifests of this run, by step."""
        for step in self._steps():
            try:
                manifest = self._manifest(step)
            except CorruptCheckpoint:
                continue
            if manifest is not None and manifest.run_id == self.run_id:
                yield manifest

    def _counting(self, claims: Sequence[Claim]) -> list[CheckpointRef]:
        """What counts by lineage, best first; the files are not looked at."""
        return _best_first(
            CheckpointRef(manifest)
            for manifest in self._manifests()
            if why_ignored(manifest.step, manifest.attempt, claims) is None
        )

    def _survey(self, claims: Sequence[Claim]) -> Survey:
        """The survey as it is under these claims."""
        complete: list[CheckpointRef] = []
        ignored: list[Skipped] = []
        damaged: list[Skipped] = []
        torn: list[Skipped] = []
        foreign: list[str] = []
        steps: list[int] = []
        for name in self.storage.names():
            step = _step_of(name)
            if step is not None:
                steps.append(step)
            elif name != OWNER_NAME and claimed_attempt(name) is None:
                foreign.append(name)
        for step in sorted(steps):
            try:
                manifest, absent = self._manifest_and_absent(step)
            except CorruptCheckpoint as err:
                damaged.append(Skipped(step, None, str(err)))
                continue
            if manifest is None:
                torn += self._torn(step, newest_claim(claims))
                continue
            reason = why_ignored(step, manifest.attempt, claims)
            if manifest.run_id != self.run_id:
                reason = f"belongs to run {manifest.run_id}"
            if reason is not None:
                ignored.append(Skipped(step, manifest.attempt, reason))
            elif absent:
                damaged.append(Skipped(step, manifest.attempt, "; ".join(absent[:_LISTED])))
            else:
                complete.append(CheckpointRef(manifest))
        return Survey(
            complete=tuple(_best_first(complete)),
            ignored=tuple(ignored),
            damaged=tuple(damaged),
            torn=tuple(torn),
            foreign=tuple(foreign),
        )

    def _manifest_and_absent(self, step: int) -> tuple[CheckpointManifest | None, list[str]]:
        """The step's manifest and what `_absent` says of it, both of one moment."""
        for _ in range(_TRIES):
            manifest = self._manifest(step)
            absent = self._absent(manifest) if manifest else []
            # Files that are missing because somebody is deleting the checkpoint are no damage.
            if manifest is None or not absent or self._is_current(manifest):
                return manifest, absent
        raise StorageError(f"{self.storage.uri}/{step_directory(step)}: keeps changing")

    def _is_current(self, manifest: CheckpointManifest) -> bool:
        try:
            return self._manifest(manifest.step) == manifest
        except CorruptCheckpoint:
            return False

    def _torn(self, step: int, newest: Claim | None) -> list[Skipped]:
        """The step as one without a manifest; empty where nothing is in its directory either."""
        names = self.storage.names(step_directory(step))
        if not names:
            return []
        attempt = max(filter(None, map(attempt_of, names)), default=None)
        if newest is not None and attempt == newest.attempt:
            return [Skipped(step, attempt, "no manifest: unfinished, or just being written")]
        return [Skipped(step, attempt, "no manifest: unfinished")]

    def _absent(self, manifest: CheckpointManifest) -> list[str]:
        """What is missing or of another size among the files listed, in words."""
        problems: list[str] = []
        names = [entry.name for entry in manifest.files]
        sizes = self.storage.sizes(step_directory(manifest.step), names)
        for entry in manifest.files:
            size = sizes.get(entry.name)
            if size != entry.size_bytes:
                problems.append(_size_problem(entry, size))
        return problems

    def _wrong(self, step: int, entry: FileEntry) -> str | None:
        """What is wrong with one file, in words; reads it to the end."""
        path = file_path(step, entry.name)
        size = self.storage.size(path)
        if size != entry.size_bytes:
            return _size_problem(entry, size)
        digest = Digest()
        try:
            for chunk in self.storage.stream(path):
                digest.update(chunk)
        except FileNotFoundError:
            return f"{entry.name} vanished while it was read"
        if digest.text != entry.digest:
            return f"{entry.name} differs from its digest"
        return None

    def _none_usable(self, skipped: Sequence[Skipped]) -> CorruptCheckpoint:
        listed = [f"step {one.step}: {one.reason}" for one in reversed(skipped)]
        if len(listed) > _LISTED:
            listed[_LISTED:] = [f"and {len(listed) - _LISTED} more"]
        what = "; ".join(listed) or "nothing is left"
        return CorruptCheckpoint(
            f"{self.storage.uri}: run {self.run_id} has saved before, but no checkpoint is usable "
            f"({what})",
            "restore one from a copy; to begin again from step 0, submit a new run",
        )

    def _drop_unlisted(self, step: int, attempts: range) -> tuple[str, ...]:
        """Remove these attempts' files of `step` that its manifest does not list.

        Then the directory, if it is empty. Returns warnings of what failed.
        """
        warnings: list[str] = []
        try:
            manifest = self._manifest(step)
            listed = {entry.name for entry in manifest.files} if manifest else set[str]()
            for name in self.storage.names(step_directory(step)):
                if attempt_of(name) in attempts and name not in listed:
                    try:
                        self.storage.remove(file_path(step, name))
                    except StorageError as err:
                        warnings.append(str(err))
            if manifest is None:
                self.storage.remove_empty_dir(step_directory(step))
        except CorruptCheckpoint:
            pass  # a manifest that cannot be read may list any of them
        except StorageError as err:
            warnings.append(str(err))
        return tuple(warnings)

    def _abort_uploads(self, attempts: range) -> tuple[str, ...]:
        """Abort what these attempts began to upload and do not go on with; warnings of failures."""
        try:
            self.storage.abort_uploads(lambda name: attempt_of(name.rpartition("/")[2]) in attempts)
        except StorageError as err:
            return (str(err),)
        return ()

    def _retain(
        self,
        attempt: int,
        stands_on: Sequence[CheckpointRef],
        keep_last: int,
        keep_every: int | None,
        is_whole: Callable[[CheckpointRef], bool],
    ) -> Removal:
        """`stands_on` is best first."""
        assert keep_last >= 2, keep_last
        assert keep_every is None or keep_every >= 1, keep_every
        last = list(islice(filter(is_whole, stands_on), keep_last))
        if len(last) < keep_last:
            return Removal()
        kept = {ref.step for ref in last}
        if keep_every is not None:
            kept |= {ref.step for ref in stands_on if ref.step % keep_every == 0}
        removed: list[int] = []
        warnings: list[str] = []
        for manifest in self._manifests():
            if manifest.step >= last[0].step or manifest.step in kept:
                continue
            if manifest.attempt > attempt:
                continue
            self._refuse_if_fenced(attempt)
            try:
                self._remove(manifest)
            except StorageError as err:
                warnings.append(str(err))
            else:
                removed.append(manifest.step)
        return Removal(tuple(removed), tuple(warnings))

    def _remove(self, manifest: CheckpointManifest) -> None:
        # The manifest goes first: killed in between, this leaves a torn directory, which means
        # nothing, and never a manifest whose files are missing, which would mean damage.
        self.storage.remove(file_path(manifest.step, MANIFEST_NAME))
        for entry in manifest.files:
            self.storage.remove(file_path(manifest.step, entry.name))
        self.storage.remove_empty_dir(step_directory(manifest.step))


def _owner(storage: Storage) -> str | None:
    try:
        data = storage.read(OWNER_NAME)
    except FileNotFoundError:
        return None
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        content = None
    run_id = content.get("run_id") if isinstance(content, dict) else None
    if not isinstance(run_id, str):
        raise CorruptCheckpoint(
            f"{storage.uri}/{OWNER_NAME}: does not name a run",
            'restore it: {"run_id": "..."} with the id of the run whose checkpoints these are',
        )
    return run_id


def _step_of(name: str) -> int | None:
    """The step of a step directory's name as `names` gives it; None for any other name."""
    match = _STEP_DIRECTORY.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and name == f"{step_directory(step)}/" else None


def _best_first(refs: Iterable[CheckpointRef]) -> list[CheckpointRef]:
    return sorted(refs, key=lambda ref: rank_of(ref.step, ref.attempt), reverse=True)


def _by_step(skipped: Iterable[Skipped]) -> list[Skipped]:
    return sorted(skipped, key=lambda one: one.step)


def _digested(chunks: Iterable[Chunk], digest: Digest) -> Iterator[Chunk]:
    for chunk in chunks:
        view = flat(chunk)
        digest.update(view)
        yield view


def _size_problem(entry: FileEntry, size: int | None) -> str:
    if size is None:
        return f"{entry.name} is missing"
    return f"{entry.name} has {size} bytes, not {entry.size_bytes}"


def _in_a_line(err: Exception) -> str:
    if isinstance(err, ValidationError):
        first = err.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return str(err)
