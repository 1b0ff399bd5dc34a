"""The rules of the checkpoint store, on disk, on a store without directories, and on real S3."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from store_helpers import (
    RUN,
    CutOff,
    MemoryStorage,
    content,
    flip_a_byte,
    holds_its_content,
    manifest_of,
    save,
    write_files,
)

from trainer.spec.errors import (
    CheckpointError,
    CorruptCheckpoint,
    Fenced,
    NotFound,
    StorageError,
)
from trainer.store.checkpoints import CheckpointStore, Skipped, file_path, step_directory
from trainer.store.fsspec_storage import FsspecStorage
from trainer.store.manifest import MANIFEST_NAME, shard_name
from trainer.store.storage import LocalStorage, Storage


@pytest.fixture(
    params=["disk", "objects", "fsspec", pytest.param("s3", marks=pytest.mark.slow)],
)
def store(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> CheckpointStore:
    # No power is lost here; test_store_storage.py holds what is synced when.
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)
    storage: Storage = MemoryStorage()
    if request.param == "disk":
        storage = LocalStorage(tmp_path / "place")
    elif request.param == "fsspec":
        storage = FsspecStorage(f"memory://{secrets.token_hex(8)}/place")
    elif request.param == "s3":
        storage = request.getfixturevalue("s3_place")
    store = CheckpointStore(storage, RUN)
    store.own()
    return store


def cut_off(store: CheckpointStore, attempt: int) -> CheckpointStore:
    """The store as attempt `attempt` on a cut-off node goes on using it."""
    return CheckpointStore(CutOff(store.storage, attempt), store.run_id)


def begin(store: CheckpointStore) -> int:
    return store.claim_next("job", 0).attempt


def steps(store: CheckpointStore) -> list[int]:
    return [ref.step for ref in store.survey().complete]


def put(storage: Storage, name: str, data: bytes) -> None:
    storage.remove(name)
    storage.create(name, [data])


def drop_manifest(store: CheckpointStore, step: int) -> None:
    assert store.storage.remove(file_path(step, MANIFEST_NAME))


def all_files(store: CheckpointStore) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for name in store.storage.names():
        inner = store.storage.names(name[:-1]) if name.endswith("/") else [""]
        for one in inner:
            found[name + one] = store.storage.read(name + one)
    return found


# -- Owner and claims ------------------------------------------------------------------------


def test_a_place_belongs_to_one_run(store: CheckpointStore) -> None:
    store.own()
    assert store.owner() == RUN
    assert CheckpointStore.existing(store.storage).run_id == RUN
    with pytest.raises(CheckpointError, match=f"of run {RUN}, not of other.*{{run_id}}") as caught:
        CheckpointStore(store.storage, "other").own()
    assert caught.value.exit_code == 6


def test_a_place_without_an_owner_has_no_store() -> None:
    store = CheckpointStore(MemoryStorage(), RUN)
    assert store.owner() is None
    with pytest.raises(NotFound, match=r"owner\.json is missing"):
        CheckpointStore.existing(store.storage)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"run_id": 3}', b"\xff"])
def test_an_owner_file_that_names_no_run_is_an_error(store: CheckpointStore, data: bytes) -> None:
    put(store.storage, "owner.json", data)
    with pytest.raises(CorruptCheckpoint, match=r"owner\.json: does not name a run"):
        store.own()


def test_attempts_are_numbered_and_remember_where_they_resume(store: CheckpointStore) -> None:
    assert store.newest_attempt() == 0
    first = store.claim_next("812", 0)
    save(store, 5, 1)
    second = store.claim_next("812", 1)
    third = store.claim_next("900", 0, after_attempt=6)
    assert [first.attempt, second.attempt, third.attempt] == [1, 2, 7]
    assert [first.resume, second.resume, third.resume] == [None, (5, 1), (5, 1)]
    assert store.claims() == [first, second, third]
    assert store.newest_attempt() == 7
    raw = json.loads(store.storage.read("attempt-2.json"))
    assert raw == {
        "attempt": 2,
        "resume": [5, 1],
        "job": "812",
        "restart": 1,
        "claimed_at": second.claimed_at,
    }


def test_claims_are_ordered_by_number_not_as_text(store: CheckpointStore) -> None:
    for _ in range(11):
        begin(store)
    assert [claim.attempt for claim in store.claims()] == list(range(1, 12))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property"),
        (b"[]", "not a mapping"),
        (b"{}", "resume: Field required"),
        (b'{"resume": [1]}', "resume"),
        (b'{"attempt": 3, "resume": null}', "it says attempt 3"),
    ],
)
def test_a_claim_that_cannot_be_read_stops_everything(
    store: CheckpointStore, data: bytes, message: str
) -> None:
    begin(store)
    put(store.storage, "attempt-2.json", data)
    for act in (store.claims, store.survey, store.newest_good, lambda: begin(store)):
        with pytest.raises(CorruptCheckpoint, match=rf"attempt-2\.json.*{message}.*restore it"):
            act()


def test_a_claim_needs_only_what_the_rule_needs(store: CheckpointStore) -> None:
    put(store.storage, "attempt-1.json", b'{"resume": [4, 1], "job": "7", "new": true}')
    assert store.claims()[0].resume == (4, 1)


def test_a_lost_race_looks_again_for_where_to_resume(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)

    class Rival(CutOff):
        """Claims attempt 2 and commits between our look and our claim."""

        def claim(self, name: str, data: bytes) -> bool:
            if name == "attempt-2.json" and store.newest_attempt() == 1:
                begin(store)
                save(store, 9, 2)
            return store.storage.claim(name, data)

    claim = CheckpointStore(Rival(store.storage, 99), RUN).claim_next("late", 0)
    assert (claim.attempt, claim.resume) == (3, (9, 2))


def test_going_back_on_purpose(store: CheckpointStore) -> None:
    begin(store)
    for step in (4, 8, 12):
        save(store, step, 1)
    with pytest.raises(
        NotFound, match=r"no checkpoint at or before step 3; there is one at .* 12, 8, 4"
    ):
        store.claim_next("job", 0, at_most_step=3)
    assert store.newest_attempt() == 1
    assert store.claim_next("job", 0, at_most_step=9).resume == (8, 1)
    assert steps(store) == [8, 4]


# -- What counts -----------------------------------------------------------------------------


def test_an_empty_place_is_a_fresh_start(store: CheckpointStore) -> None:
    claim = store.claim_next("job", 0)
    assert claim.resume is None
    assert store.newest_good() is None
    assert store.newest_good(claim) is None
    assert not store.survey().ever_committed


def test_steps_are_ordered_by_number_not_as_text(store: CheckpointStore) -> None:
    begin(store)
    for step in (99_999_999, 100_000_000, 9):
        save(store, step, 1)
    assert steps(store) == [100_000_000, 99_999_999, 9]
    assert store.claim_next("job", 0).resume == (100_000_000, 1)


def test_a_late_commit_of_a_cut_off_attempt_is_ignored(store: CheckpointStore) -> None:
    begin(store)
    save(store, 10, 1)
    assert store.claim_next("job", 1).resume == (10, 1)
    zombie = cut_off(store, 1)
    for step in (12, 15):
        save(zombie, step, 1)
    survey = store.survey()
    assert [ref.step for ref in survey.complete] == [10]
    assert [(one.step, one.attempt) for one in survey.ignored] == [(12, 1), (15, 1)]
    assert "attempt 2 went on from step 10" in survey.ignored[0].reason
    save(store, 11, 2)
    newest = store.newest_good()
    assert newest is not None
    assert (newest.step, newest.attempt) == (11, 2)
    assert store.claim_next("job", 2).resume == (11, 2)
    assert steps(store) == [11, 10]


def test_nothing_older_counts_for_an_attempt_that_started_afresh(store: CheckpointStore) -> None:
    begin(store)
    write_files(store, 5, 1)
    assert store.claim_next("job", 1).resume is None
    save(cut_off(store, 1), 5, 1)
    survey = store.survey()
    assert survey.complete == ()
    assert "attempt 2 started afresh" in survey.ignored[0].reason
    # It is nothing to resume from, and no reason to refuse: attempt 2 was right to start afresh.
    assert not survey.ever_committed
    assert store.claim_next("job", 2).resume is None
    assert store.newest_good() is None


def test_the_newest_attempt_comes_first_even_at_a_lower_step(store: CheckpointStore) -> None:
    begin(store)
    for step in (10, 11, 12):
        save(store, step, 1)
    for step in (11, 12):
        flip_a_byte(store, step, shard_name(1, 0))
    claim = store.claim_next("job", 1)
    assert claim.resume == (12, 1)
    skipped: list[Skipped] = []
    good = store.newest_good(claim, skipped.append)
    assert good is not None
    assert good.step == 10
    assert [(one.step, one.reason) for one in skipped] == [
        (11, "shard-a1-r0.bin differs from its digest"),
        (12, "shard-a1-r0.bin differs from its digest"),
    ]
    save(store, 11, 2)
    assert [(ref.step, ref.attempt) for ref in store.survey().complete] == [
        (11, 2),
        (12, 1),
        (10, 1),
    ]
    assert store.claim_next("job", 2).resume == (11, 2)
    assert steps(store) == [11, 10]


def test_candidates_are_what_an_attempt_may_resume_from(store: CheckpointStore) -> None:
    begin(store)
    save(store, 3, 1)
    save(store, 6, 1)
    second = store.claim_next("job", 1)
    save(store, 9, 2)
    third = store.claim_next("job", 2)
    save(store, 12, 3)
    assert [ref.step for ref in store.candidates(second)] == [6, 3]
    assert [ref.step for ref in store.candidates(third)] == [9, 6, 3]
    found = [store.newest_good(claim) for claim in (second, third, None)]
    assert [ref and ref.step for ref in found] == [6, 9, 12]
    # What a claim says for its attempt does not change when a later one goes further back.
    store.claim_next("job", 3, at_most_step=3)
    assert [ref.step for ref in store.candidates(second)] == [6, 3]
    good = store.newest_good(second)
    assert good is not None
    assert good.step == 6


def test_a_directory_alone_means_nothing(store: CheckpointStore) -> None:
    begin(store)
    write_files(store, 5, 1)
    store.storage.create("step-00000007/notes.txt", [b"mine"])
    store.storage.create("step-7/shard-a1-r0.bin", [b"mine"])
    store.storage.create("step-0000000007/x", [b"mine"])
    store.storage.create("step-00000005-important/manifest.json", [b"mine"])
    store.storage.create("latest", [b"step-00000005"])
    survey = store.survey()
    assert survey.complete == survey.damaged == survey.ignored == ()
    assert [(one.step, one.attempt) for one in survey.torn] == [(5, 1), (7, None)]
    assert "just being written" in survey.torn[0].reason
    assert survey.foreign == (
        "latest",
        "step-0000000007/",
        "step-00000005-important/",
        "step-7/",
    )
    assert not survey.ever_committed
    assert store.newest_good() is None
    assert begin(store) == 2
    assert store.survey().torn[0].reason == "no manifest: unfinished"


def damage(store: CheckpointStore, step: int, kind: str) -> None:
    manifest, shard = file_path(step, MANIFEST_NAME), file_path(step, shard_name(1, 1))
    if kind == "empty manifest":
        put(store.storage, manifest, b"")
    elif kind == "cut manifest":
        put(store.storage, manifest, store.storage.read(manifest)[:200])
    elif kind == "manifest of another step":
        put(store.storage, manifest, store.storage.read(file_path(4, MANIFEST_NAME)))
    elif kind == "flipped manifest":
        flip_a_byte(store, step, MANIFEST_NAME, at=60)
    elif kind == "missing shard":
        store.storage.remove(shard)
    elif kind == "short shard":
        put(store.storage, shard, store.storage.read(shard)[:-1])
    elif kind == "flipped shard":
        flip_a_byte(store, step, shard_name(1, 1), at=2999)


SEEN_BY_SURVEY = {
    "empty manifest": "the manifest is empty",
    "cut manifest": "the manifest is not JSON",
    "manifest of another step": "the manifest is that of step 4",
    "flipped manifest": "the manifest",
    "missing shard": "shard-a1-r1.bin is missing",
    "short shard": "shard-a1-r1.bin has 2999 bytes, not 3000",
}


@pytest.mark.parametrize("kind", [*SEEN_BY_SURVEY, "flipped shard"])
def test_damage_is_passed_over_with_its_reason(store: CheckpointStore, kind: str) -> None:
    begin(store)
    for step in (4, 8):
        save(store, step, 1)
    damage(store, 8, kind)
    skipped: list[Skipped] = []
    good = store.newest_good(on_skip=skipped.append)
    assert good is not None
    assert good.step == 4
    assert holds_its_content(store, good)
    reason = SEEN_BY_SURVEY.get(kind, "shard-a1-r1.bin differs from its digest")
    assert [one.step for one in skipped] == [8]
    assert skipped[0].reason.startswith(reason)
    assert [one.step for one in store.survey().damaged] == ([8] if kind in SEEN_BY_SURVEY else [])


@pytest.mark.parametrize(
    "kind",
    [kind for kind in (*SEEN_BY_SURVEY, "flipped shard") if kind != "manifest of another step"],
)
def test_there_is_no_silent_fresh_start_after_a_commit(store: CheckpointStore, kind: str) -> None:
    begin(store)
    save(store, 8, 1)
    claim = store.claim_next("job", 1) if kind == "flipped shard" else None
    damage(store, 8, kind)
    reason = SEEN_BY_SURVEY.get(kind, "shard-a1-r1.bin differs")
    for wanted in {None, claim}:
        with pytest.raises(CorruptCheckpoint, match=rf"no checkpoint is usable \(step 8: {reason}"):
            store.newest_good(wanted)
    if kind in SEEN_BY_SURVEY:
        with pytest.raises(CorruptCheckpoint, match=r"no checkpoint is usable"):
            begin(store)
        assert store.newest_attempt() == 1


def test_what_the_run_remembers_counts_as_a_commit(store: CheckpointStore) -> None:
    """Its manifests are gone, but the run directory has a `saved` event."""
    claim = store.claim_next("job", 0)
    assert store.newest_good(claim) is None
    for act in (
        lambda: store.claim_next("job", 0, ever_saved=True),
        lambda: store.newest_good(ever_saved=True),
    ):
        with pytest.raises(CorruptCheckpoint, match=r"saved before.*\(nothing is left\).*new run"):
            act()


def test_a_resume_point_that_is_gone_is_an_error(store: CheckpointStore) -> None:
    begin(store)
    save(store, 8, 1)
    claim = store.claim_next("job", 1)
    drop_manifest(store, 8)
    with pytest.raises(CorruptCheckpoint, match="step 8: no manifest"):
        store.newest_good(claim)


def test_a_long_list_of_damage_is_cut(store: CheckpointStore) -> None:
    begin(store)
    for step in range(1, 12):
        save(store, step, 1)
        put(store.storage, file_path(step, MANIFEST_NAME), b"")
    with pytest.raises(CorruptCheckpoint, match=r"\(step 11: .*step 4: .*; and 3 more\)"):
        begin(store)


def test_verify_reads_the_files_named(store: CheckpointStore) -> None:
    begin(store)
    save(store, 8, 1)
    ref = store.survey().complete[0]
    assert store.verify(ref) == []
    flip_a_byte(store, 8, shard_name(1, 0))
    store.storage.remove(file_path(8, shard_name(1, 1)))
    assert store.verify(ref) == [
        "shard-a1-r0.bin differs from its digest",
        "shard-a1-r1.bin is missing",
    ]
    assert store.verify(ref, [shard_name(1, 0)]) == ["shard-a1-r0.bin differs from its digest"]
    assert store.verify(ref, ["index-a1.json"]) == []


def test_a_checkpoint_deleted_meanwhile_is_not_damage(store: CheckpointStore) -> None:
    begin(store)
    save(store, 8, 1)
    ref = store.survey().complete[0]
    assert store.is_current(ref)
    drop_manifest(store, 8)
    store.storage.remove(file_path(8, shard_name(1, 1)))
    assert store.verify(ref) == ["deleted or replaced while it was read"]
    assert not store.is_current(ref)


def test_a_checkpoint_deleted_during_a_survey_is_not_damage(store: CheckpointStore) -> None:
    begin(store)
    for step in (4, 6, 8):
        save(store, step, 1)

    class Retaining(CutOff):
        """The run retains while the survey has read a manifest and not yet looked at its files."""

        def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
            store.retain(1, keep_last=2, keep_every=None, resumed_step=None)
            return store.storage.sizes(directory, names)

    survey = CheckpointStore(Retaining(store.storage, 99), RUN).survey()
    assert survey.damaged == ()
    assert [ref.step for ref in survey.complete] == [8, 6]


def test_another_runs_manifest_is_no_checkpoint_of_ours(store: CheckpointStore) -> None:
    other = CheckpointStore(store.storage, "other")
    begin(store)
    save(other, 8, 1)
    survey = store.survey()
    assert survey.complete == ()
    assert survey.ignored == (Skipped(8, 1, "belongs to run other"),)
    before = store.storage.read(file_path(8, MANIFEST_NAME))
    with pytest.raises(CheckpointError, match="belongs to run other, not"):
        store.commit(manifest_of(8, 1, write_files(store, 8, 1)))
    assert store.storage.read(file_path(8, MANIFEST_NAME)) == before


# -- Writing ---------------------------------------------------------------------------------


def test_a_save_tried_again_overwrites_nothing(store: CheckpointStore) -> None:
    begin(store)
    first = write_files(store, 5, 1)
    again = store.create_file(5, shard_name(1, 0), [b"other"])
    assert again.name == "shard-a1-r0-t2.bin"
    assert store.storage.read(file_path(5, "shard-a1-r0.bin")) == content(5, 1, 0)
    assert store.storage.read(file_path(5, again.name)) == b"other"
    assert store.commit(manifest_of(5, 1, [again, *first[1:]])) == ()
    assert shard_name(1, 0) not in store.storage.names(step_directory(5))
    # The same step once more: the final save of a run whose last step was a periodic one.
    entries = write_files(store, 5, 1)
    assert store.commit(manifest_of(5, 1, entries)) == ()
    names = store.storage.names(step_directory(5))
    assert names == sorted([MANIFEST_NAME, *(entry.name for entry in entries)])
    assert steps(store) == [5]
    assert store.verify(store.survey().complete[0]) == []


def test_a_commit_needs_every_file_in_full(store: CheckpointStore) -> None:
    begin(store)
    entries = write_files(store, 5, 1)
    store.storage.remove(file_path(5, shard_name(1, 1)))
    put(store.storage, file_path(5, shard_name(1, 0)), b"short")
    with pytest.raises(
        StorageError, match=r"not committed: .* has 5 bytes, not 3000; .* is missing"
    ):
        store.commit(manifest_of(5, 1, entries))
    assert MANIFEST_NAME not in store.storage.names(step_directory(5))


def test_a_step_saved_again_replaces_the_older_attempts(store: CheckpointStore) -> None:
    begin(store)
    for step in (10, 12):
        save(store, step, 1)
    store.storage.create("step-00000012/notes.txt", [b"mine"])
    store.claim_next("job", 1)
    save(store, 12, 2)
    newest = store.newest_good()
    assert newest is not None
    assert (newest.step, newest.attempt) == (12, 2)
    assert holds_its_content(store, newest)
    listed = [entry.name for entry in newest.manifest.files]
    assert store.storage.names("step-00000012") == sorted([*listed, MANIFEST_NAME, "notes.txt"])


def test_a_damaged_manifest_is_replaced(store: CheckpointStore) -> None:
    begin(store)
    for step in (10, 12):
        save(store, step, 1)
    damage(store, 12, "empty manifest")
    assert store.claim_next("job", 1).resume == (10, 1)
    save(store, 12, 2)
    assert [(ref.step, ref.attempt) for ref in store.survey().complete] == [(12, 2), (10, 1)]


def test_a_newer_attempt_fences_the_older_off(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    files = write_files(store, 10, 1)
    begin(store)
    with pytest.raises(
        Fenced, match=r"attempt 2 of run .* has taken over from attempt 1"
    ) as caught:
        store.commit(manifest_of(10, 1, files))
    assert caught.value.exit_code == 93
    assert store.survey().torn[0].step == 10


def test_a_newer_attempt_that_swept_the_shards_fences_the_older_off(store: CheckpointStore) -> None:
    begin(store)
    files = write_files(store, 10, 1)

    class Overtaken(CutOff):
        def sizes(self, directory: str, names: Iterable[str]) -> dict[str, int]:
            if store.newest_attempt() == 1:
                store.sweep(begin(store))
            return store.storage.sizes(directory, names)

    with pytest.raises(Fenced, match="attempt 2"):
        CheckpointStore(Overtaken(store.storage, 99), RUN).commit(manifest_of(10, 1, files))


def test_a_newer_attempts_manifest_fences_even_the_cut_off(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    begin(store)
    save(store, 10, 2)
    files = write_files(store, 10, 1)
    before = all_files(store)
    with pytest.raises(Fenced, match="attempt 2 has committed it, attempt 1 must not"):
        cut_off(store, 1).commit(manifest_of(10, 1, files))
    assert all_files(store) == before


def test_a_commit_overtaken_at_the_last_moment_says_so(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    files = write_files(store, 10, 1)

    class Overtaken(CutOff):
        def claim(self, name: str, data: bytes) -> bool:
            if name.endswith(MANIFEST_NAME):
                begin(store)
            return store.storage.claim(name, data)

    with pytest.raises(Fenced, match="attempt 2"):
        CheckpointStore(Overtaken(store.storage, 99), RUN).commit(manifest_of(10, 1, files))
    assert steps(store) == [5]


def test_a_failed_save_is_cleared_away_and_a_good_one_is_not(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    write_files(store, 5, 1)
    write_files(store, 10, 1)
    store.storage.create("step-00000005/notes.txt", [b"mine"])
    assert store.discard(10, 1) == ()
    assert store.discard(5, 1) == ()
    assert store.survey().torn == ()
    assert steps(store) == [5]
    assert store.verify(store.survey().complete[0]) == []
    assert len(store.storage.names("step-00000005")) == 3 + 1 + 1


# -- Retention -------------------------------------------------------------------------------


def run_steps(
    store: CheckpointStore,
    attempt: int,
    steps_to_save: range,
    keep_last: int = 2,
    keep_every: int | None = None,
    resumed_step: int | None = None,
) -> list[int]:
    removed: list[int] = []
    for step in steps_to_save:
        save(store, step, attempt)
        removal = store.retain(
            attempt, keep_last=keep_last, keep_every=keep_every, resumed_step=resumed_step
        )
        assert removal.warnings == ()
        removed += removal.steps
    return removed


def test_the_last_few_are_kept(store: CheckpointStore) -> None:
    begin(store)
    assert run_steps(store, 1, range(1, 7), keep_last=3) == [1, 2, 3]
    assert steps(store) == [6, 5, 4]
    assert store.survey().torn == ()
    names = store.storage.names()
    # An object store may list for a while what has been emptied.
    assert [n for n in names if not n.endswith("/") or store.storage.names(n[:-1])] == [
        "attempt-1.json",
        "owner.json",
        "step-00000004/",
        "step-00000005/",
        "step-00000006/",
    ]


def test_some_are_kept_for_good(store: CheckpointStore) -> None:
    begin(store)
    assert run_steps(store, 1, range(1, 12), keep_every=4) == [1, 2, 3, 5, 6, 7, 9]
    assert steps(store) == [11, 10, 8, 4]
    begin(store)
    run_steps(store, 2, range(12, 18), keep_every=4, resumed_step=11)
    assert steps(store) == [17, 16, 12, 8, 4]


@pytest.mark.parametrize("kind", ["missing shard", "short shard", "empty manifest"])
def test_the_damaged_do_not_count_and_the_torn_neither(store: CheckpointStore, kind: str) -> None:
    begin(store)
    for step in (4, 6, 8):
        save(store, step, 1)
    damage(store, 8, kind)
    write_files(store, 9, 1)
    write_files(store, 10, 1)
    assert store.retain(1, keep_last=2, keep_every=None, resumed_step=None).steps == ()
    assert steps(store) == [6, 4]
    save(store, 12, 1)
    assert store.retain(1, keep_last=2, keep_every=None, resumed_step=None).steps == (
        (4, 8) if kind != "empty manifest" else (4,)
    )
    assert steps(store) == [12, 6]


def test_going_back_costs_neither_the_resume_point_nor_what_is_newer(
    store: CheckpointStore,
) -> None:
    begin(store)
    for step in (9, 10, 11, 12):
        save(store, step, 1)
    for step in (11, 12):
        flip_a_byte(store, step, shard_name(1, 0))
    claim = store.claim_next("job", 1)
    good = store.newest_good(claim)
    assert good is not None
    assert good.step == 10
    # 11 and 12 look whole, yet this attempt does not stand on them: 10 stays until two newer do.
    assert run_steps(store, 2, range(11, 12), resumed_step=10) == [9]
    assert [(r.step, r.attempt) for r in store.survey().complete] == [(11, 2), (12, 1), (10, 1)]
    assert run_steps(store, 2, range(12, 13), resumed_step=10) == [10]
    assert [(r.step, r.attempt) for r in store.survey().complete] == [(12, 2), (11, 2)]


def test_what_a_return_left_behind_goes_once_training_has_passed_it(store: CheckpointStore) -> None:
    begin(store)
    for step in (5, 10, 15):
        save(store, step, 1)
    store.claim_next("job", 1, at_most_step=5)
    assert run_steps(store, 2, range(6, 10, 3), resumed_step=5) == [5]
    assert [one.step for one in store.survey().ignored] == [10, 15]
    assert run_steps(store, 2, range(12, 13), resumed_step=5) == [6, 10]
    assert [one.step for one in store.survey().ignored] == [15]
    assert steps(store) == [12, 9]


def test_a_cut_off_attempt_deletes_nothing(store: CheckpointStore) -> None:
    begin(store)
    for step in (5, 10, 15):
        save(store, step, 1)
    begin(store)
    before = all_files(store)
    with pytest.raises(Fenced):
        store.retain(1, keep_last=2, keep_every=None, resumed_step=None)
    assert all_files(store) == before


def test_even_a_blind_one_leaves_the_newer_attempts_resume_point(store: CheckpointStore) -> None:
    begin(store)
    for step in (5, 10, 15):
        save(store, step, 1)
    claim = store.claim_next("job", 1)
    cut_off(store, 1).retain(1, keep_last=2, keep_every=None, resumed_step=None)
    good = store.newest_good(claim)
    assert good is not None
    assert (good.step, good.attempt) == claim.resume == (15, 1)


def test_even_a_blind_one_deletes_nothing_of_a_newer_attempt(store: CheckpointStore) -> None:
    begin(store)
    save(store, 10, 1)
    begin(store)
    for step in (11, 12):
        save(store, step, 2)
    for step in (14, 15):
        save(cut_off(store, 1), step, 1)
    cut_off(store, 1).retain(1, keep_last=2, keep_every=None, resumed_step=None)
    assert [(ref.step, ref.attempt) for ref in store.survey().complete] == [(12, 2), (11, 2)]


def test_another_runs_checkpoints_are_never_deleted(store: CheckpointStore) -> None:
    other = CheckpointStore(store.storage, "other")
    begin(store)
    save(other, 1, 1)
    before = store.storage.read(file_path(1, MANIFEST_NAME))
    run_steps(store, 1, range(2, 6))
    store.prune(keep_last=2, keep_every=None)
    assert store.storage.read(file_path(1, MANIFEST_NAME)) == before
    assert steps(other) == [1]


def test_foreign_files_are_never_touched(store: CheckpointStore) -> None:
    foreign = {
        "step-100-important/manifest.json": b"mine",
        "step-00000001/notes.txt": b"mine",
        "step-00000001/shard-a1.bin.bak": b"mine",
        "step-00000002/manifest.json.old": b"mine",
        "README": b"mine",
        "attempt-x.json": b"mine",
    }
    for name, data in foreign.items():
        store.storage.create(name, [data])
    begin(store)
    assert run_steps(store, 1, range(1, 6)) == [1, 2, 3]
    begin(store)
    write_files(store, 7, 1)
    store.sweep(2)
    store.prune(keep_last=2, keep_every=None)
    assert {name: store.storage.read(name) for name in foreign} == foreign


def test_a_deletion_that_fails_is_a_warning(store: CheckpointStore) -> None:
    class Stubborn(CutOff):
        def remove(self, name: str) -> bool:
            if name.startswith("step-00000001/"):
                raise StorageError(f"{name}: cannot be removed")
            return store.storage.remove(name)

    begin(store)
    for step in (1, 2, 3, 4):
        save(store, step, 1)
    stubborn = CheckpointStore(Stubborn(store.storage, 99), RUN)
    removal = stubborn.retain(1, keep_last=2, keep_every=None, resumed_step=None)
    assert removal.steps == (2,)
    assert removal.warnings == ("step-00000001/manifest.json: cannot be removed",)
    assert steps(store) == [4, 3, 1]
    begin(store)
    write_files(store, 1, 1)
    assert stubborn.sweep(2).warnings[0].startswith("step-00000001/")


@pytest.mark.parametrize("keep_last", [-1, 0, 1])
def test_fewer_than_two_are_never_kept(store: CheckpointStore, keep_last: int) -> None:
    with pytest.raises(AssertionError):
        store.retain(1, keep_last=keep_last, keep_every=None, resumed_step=None)
    with pytest.raises(AssertionError):
        store.prune(keep_last=keep_last, keep_every=None)


def test_pruning_trusts_only_what_it_has_read(store: CheckpointStore) -> None:
    begin(store)
    for step in (8, 9, 10, 11, 12):
        save(store, step, 1)
    for step in (8, 11, 12):
        flip_a_byte(store, step, shard_name(1, 0))
    write_files(store, 13, 1)
    begin(store)
    assert store.prune(keep_last=3, keep_every=None).steps == ()
    removal = store.prune(keep_last=2, keep_every=None)
    assert removal.steps == (8,)
    good = store.newest_good()
    assert good is not None
    assert good.step == 10
    assert store.survey().torn == ()


# -- Sweeping --------------------------------------------------------------------------------


def test_a_sweep_clears_what_older_attempts_left_and_nothing_else(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    store.create_file(5, shard_name(1, 0), [b"a save tried again"])
    write_files(store, 10, 1)
    begin(store)
    write_files(store, 12, 1)
    current = write_files(store, 12, 2)
    assert store.sweep(2).steps == (10,)
    assert steps(store) == [5]
    assert store.verify(store.survey().complete[0]) == []
    assert len(store.storage.names("step-00000005")) == 3 + 1
    assert store.storage.names("step-00000012") == sorted(entry.name for entry in current)
    assert store.commit(manifest_of(12, 2, current)) == ()


def test_a_sweep_stays_away_from_a_manifest_it_cannot_read(store: CheckpointStore) -> None:
    begin(store)
    save(store, 5, 1)
    damage(store, 5, "cut manifest")
    put(store.storage, "attempt-2.json", b'{"resume": null}')
    before = all_files(store)
    store.sweep(2)
    assert all_files(store) == before


def test_a_fenced_attempt_sweeps_nothing(store: CheckpointStore) -> None:
    begin(store)
    write_files(store, 5, 1)
    begin(store)
    begin(store)
    with pytest.raises(Fenced):
        store.sweep(2)
    assert store.survey().torn[0].step == 5


def test_a_sweep_removes_the_leftovers_of_killed_writes(tmp_path: Path) -> None:
    store = CheckpointStore(LocalStorage(tmp_path), RUN)
    store.own()
    begin(store)
    save(store, 5, 1)
    (tmp_path / "step-00000006").mkdir()
    for directory in (tmp_path, tmp_path / "step-00000005", tmp_path / "step-00000006"):
        (directory / ".tmp-77-00000000000000aa").write_bytes(b"half")
    store.sweep(1)
    assert list(tmp_path.rglob(".tmp-*")) == []
    assert not (tmp_path / "step-00000006").exists()


def test_a_copied_place_is_the_same_place(tmp_path: Path) -> None:
    store = CheckpointStore(LocalStorage(tmp_path / "a"), RUN)
    store.own()
    begin(store)
    save(store, 5, 1)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    copy = CheckpointStore.existing(LocalStorage(tmp_path / "b"))
    good = copy.newest_good()
    assert good is not None
    assert holds_its_content(copy, good)
