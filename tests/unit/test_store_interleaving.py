"""Two processes at one place: the second acts between any two system calls of the first.

Each test runs the first process again and again and lets the second one in one call later each
time, so every interleaving of that kind is tried, not a lucky few.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from store_helpers import (
    RUN,
    before_each_change,
    flip_a_byte,
    holds_its_content,
    save,
    write_files,
)

from trainer.spec.errors import Fenced
from trainer.store.checkpoints import CheckpointRef, CheckpointStore
from trainer.store.manifest import shard_name
from trainer.store.storage import LocalStorage

KEEP = 2


@pytest.fixture(autouse=True)
def no_power_is_lost_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """In memory where there is such a place: these tests make thousands of files."""
    memory = Path("/dev/shm")
    fast = memory if os.access(memory, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=fast) as place:
        yield Path(place)


def open_store(place: Path) -> CheckpointStore:
    return CheckpointStore(LocalStorage(place), RUN)


def prepared(place: Path, steps: range) -> CheckpointStore:
    """A place where attempt 1 has saved these steps."""
    store = open_store(place)
    with before_each_change(lambda *_: None):
        store.own()
        assert store.claim_next("job", 0).attempt == 1
        for step in steps:
            save(store, step, 1)
    return store


def save_and_retain(store: CheckpointStore, step: int, attempt: int, resumed: int | None) -> None:
    save(store, step, attempt)
    store.retain(attempt, keep_last=KEEP, keep_every=None, resumed_step=resumed)


def new_good(store: CheckpointStore) -> CheckpointRef:
    good = store.newest_good()
    assert good is not None
    assert holds_its_content(store, good)
    return good


def at_every_call(
    tmp_path: Path,
    prepare: Callable[[Path], CheckpointStore],
    first: Callable[[CheckpointStore], None],
    second: Callable[[CheckpointStore], None],
    check: Callable[[CheckpointStore, str], None],
) -> int:
    """Run `first` once for each of its system calls, with `second` just before that call.

    `first` may be fenced off, `second` may not. `check` also gets the name of the call. Returns how
    many calls there were.
    """
    n = 0
    while True:
        n += 1
        place = tmp_path / str(n)
        store = prepare(place)

        def intrude(count: int, *_: Any, place: Path = place, n: int = n) -> None:
            if count == n:
                second(open_store(place))

        with before_each_change(intrude) as calls, contextlib.suppress(Fenced):
            first(store)
        if len(calls) < n:
            return n - 1
        try:
            check(open_store(place), calls[n - 1])
        except BaseException as err:
            err.add_note(f"the second came before call {n}, {calls[n - 1]}, of {calls}")
            raise


def test_a_reader_always_sees_what_was_promised(tmp_path: Path) -> None:
    """Through saves, retention, damage, a return to an earlier step, and sweeps."""
    store = open_store(tmp_path)
    saved: list[int] = []
    resumed = 0
    looks = 0

    def look(*_: Any) -> None:
        nonlocal looks
        looks += 1
        survey = open_store(tmp_path).survey()
        assert survey.damaged == ()
        assert len(survey.complete) >= min(KEEP, len(saved))
        if saved:
            newest = new_good(open_store(tmp_path))
            assert newest.step >= max(saved[-1], resumed)

    with before_each_change(look):
        store.own()
        store.claim_next("job", 0)
        for step in (1, 2, 3, 4, 5):
            save_and_retain(store, step, 1, None)
            saved.append(step)
        write_files(store, 6, 1)
    flip_a_byte(store, 5, shard_name(1, 0))
    saved.pop()
    with before_each_change(look):
        claim = store.claim_next("job", 1)
        assert claim.resume == (5, 1)
        good = store.newest_good(claim)
        assert good is not None
        resumed = good.step
        assert resumed == 4
        store.sweep(2)
        for step in (5, 6, 7):
            save_and_retain(store, step, 2, resumed)
            saved.append(step)
    assert looks > 200
    assert [ref.step for ref in store.survey().complete] == [7, 6]


def test_a_poller_never_sees_fewer_than_promised(tmp_path: Path) -> None:
    """The same in real time: a thread that looks every 10 ms at what is on the disk."""
    saved: list[int] = []
    counts: list[tuple[int, int]] = []
    done = threading.Event()

    def whole(manifest: Path) -> bool:
        content = json.loads(manifest.read_bytes())
        sizes = {entry["name"]: entry["size_bytes"] for entry in content["files"]}
        return all((manifest.parent / name).stat().st_size == sizes[name] for name in sizes)

    def poll() -> None:
        while not done.is_set():
            promised = min(KEEP, len(saved))
            manifests = set(tmp_path.glob("step-*/manifest.json"))
            found = 0
            for manifest in manifests:
                with contextlib.suppress(FileNotFoundError):
                    found += whole(manifest)
            # A look is of one instant only if nothing came or went meanwhile.
            if manifests == set(tmp_path.glob("step-*/manifest.json")):
                counts.append((promised, found))
                done.wait(0.01)

    store = open_store(tmp_path)
    store.own()
    store.claim_next("job", 0)
    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for step in range(1, 41):
            save_and_retain(store, step, 1, None)
            saved.append(step)
            while len(counts) < step:
                time.sleep(0.001)
    finally:
        done.set()
        poller.join()
    assert all(found >= promised for promised, found in counts)
    assert max(found for _, found in counts) >= KEEP


@pytest.mark.parametrize("saves", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_newer_attempt_may_take_over_at_any_moment(tmp_path: Path, saves: int) -> None:
    """The older one goes on, as on a cut-off node, until it notices. It costs the newer nothing."""
    resumed: list[int] = []

    def old(store: CheckpointStore) -> None:
        for step in (4, 5):
            save_and_retain(store, step, 1, None)

    def take_over(store: CheckpointStore) -> None:
        claim = store.claim_next("job", 1)
        assert claim.attempt == 2
        store.sweep(2)
        good = store.newest_good(claim)
        assert good is not None
        assert claim.resume == (good.step, 1)
        assert holds_its_content(store, good)
        resumed.append(good.step)
        for step in range(good.step + 1, good.step + 1 + saves):
            save_and_retain(store, step, 2, good.step)

    def check(store: CheckpointStore, _call: str) -> None:
        good = new_good(store)
        assert (good.step, good.attempt) == (resumed[-1] + saves, 2)
        # Whatever the older one left, the next attempt stands where the newer one stood.
        assert store.claim_next("job", 2).resume == (good.step, good.attempt)
        store.sweep(3)
        assert store.survey().torn == ()
        assert new_good(store).step == good.step

    calls = at_every_call(
        tmp_path, lambda place: prepared(place, range(2, 4)), old, take_over, check
    )
    assert calls > 60
    assert set(resumed) == {3, 4, 5}


@pytest.mark.slow
@pytest.mark.parametrize("saves", [1, 2])
def test_a_take_over_while_going_back_over_damage(tmp_path: Path, saves: int) -> None:
    """Where manifests are replaced, the one moment between comparing and replacing costs a save."""
    resumed: list[int] = []

    def with_damage(place: Path) -> CheckpointStore:
        store = prepared(place, range(2, 5))
        with before_each_change(lambda *_: None):
            for step in (3, 4):
                flip_a_byte(store, step, shard_name(1, 0))
            claim = store.claim_next("job", 1)
            assert claim.resume == (4, 1)
        return store

    def go(store: CheckpointStore, attempt: int, saves: int) -> int:
        claim = store.claims()[attempt - 1]
        store.sweep(attempt)
        good = store.newest_good(claim)
        assert good is not None
        assert holds_its_content(store, good)
        for step in range(good.step + 1, good.step + 1 + saves):
            save_and_retain(store, step, attempt, good.step)
        return good.step

    def take_over(store: CheckpointStore) -> None:
        store.claim_next("job", 2)
        resumed.append(go(store, 3, saves))

    def check(store: CheckpointStore, call: str) -> None:
        good = new_good(store)
        if (good.step, good.attempt) != (resumed[-1] + saves, 3):
            assert call == "replace"
            assert good.step == resumed[-1] + saves - 1
        assert store.claim_next("job", 3).resume_step == good.step or call == "replace"
        assert new_good(store) == good

    calls = at_every_call(tmp_path, with_damage, lambda store: go(store, 2, 2), take_over, check)
    assert calls > 60
    assert set(resumed) == {2, 3, 4}


def test_a_user_may_prune_at_any_moment(tmp_path: Path) -> None:
    def prune(store: CheckpointStore) -> None:
        store.prune(keep_last=KEEP, keep_every=None)

    def check(store: CheckpointStore, _call: str) -> None:
        survey = store.survey()
        assert survey.damaged == survey.torn == ()
        assert [ref.step for ref in survey.complete] == [7, 6]
        assert new_good(store).step == 7

    def train(store: CheckpointStore) -> None:
        for step in (6, 7):
            save_and_retain(store, step, 1, None)

    def prepare(place: Path) -> CheckpointStore:
        return prepared(place, range(3, 6))

    assert at_every_call(tmp_path / "while-training", prepare, train, prune, check) > 60
    assert at_every_call(tmp_path / "while-pruning", prepare, prune, train, check) > 10


def test_two_may_claim_at_any_moment(tmp_path: Path) -> None:
    won: list[int] = []

    def claim(store: CheckpointStore) -> None:
        won.append(store.claim_next("job", 0).attempt)

    def check(store: CheckpointStore, _call: str) -> None:
        assert sorted(won) == [2, 3]
        assert [one.attempt for one in store.claims()] == [1, 2, 3]
        assert all(one.resume == (3, 1) for one in store.claims()[1:])
        won.clear()

    calls = at_every_call(tmp_path, lambda place: prepared(place, range(2, 4)), claim, claim, check)
    assert calls >= 6
