"""A process that uses a checkpoint place, to be killed, raced, or to die at a given system call.

    store_child.py train PLACE AT_LEAST EVER    take over, check what is there, save until killed
    store_child.py rounds URL ROUNDS SEED       have that done and killed by children, on S3
    store_child.py claim PLACE COUNT            claim COUNT attempts, print their numbers
    store_child.py die PLACE                    die at each system call in turn, check after each

It imports the store alone, so that it is up in a moment.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from store_helpers import (
    RUN,
    before_each_change,
    flip_a_byte,
    holds_its_content,
    save,
    write_files,
)

from trainer.store.checkpoints import CheckpointStore
from trainer.store.manifest import shard_name
from trainer.store.storage import LocalStorage, Storage

KEEP = 2


def say(**what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


def good_steps(store: CheckpointStore) -> list[int]:
    return [ref.step for ref in store.survey().complete if not store.verify(ref)]


def train(place: str, at_least: int, ever: int) -> None:
    take_over(LocalStorage(Path(place)), at_least, ever, say)


def take_over(
    storage: Storage,
    at_least: int,
    ever: int,
    say: Callable[..., None],
    size_of: Callable[[int], int] = lambda _attempt: 3000,
) -> None:
    """Check what the killed process before this one left, then save step after step.

    `at_least` is the last step that was reported as saved, `ever` how many were, `size_of` tells
    the bytes of an attempt's shards.
    """
    store = CheckpointStore(storage, RUN)
    store.own()
    survey = store.survey()
    assert survey.damaged == (), survey.damaged
    assert len(good_steps(store)) >= min(KEEP, ever), survey
    claim = store.claim_next("job", 0)
    good = store.newest_good(claim)
    step = good.step if good else 0
    assert step >= at_least, (step, at_least)
    assert good is None or holds_its_content(store, good, size_of(good.attempt))
    assert store.sweep(claim.attempt).warnings == ()
    assert store.survey().torn == ()
    assert leftovers(storage) == []
    resumed_step = step if good else None
    size = size_of(claim.attempt)
    say(attempt=claim.attempt, resumed=step)
    while True:
        step += 1
        say(saving=step)
        save(store, step, claim.attempt, ranks=4 if size < 10_000 else 1, size=size)
        say(saved=step)
        removal = store.retain(
            claim.attempt, keep_last=KEEP, keep_every=None, resumed_step=resumed_step
        )
        assert removal.warnings == ()


def rounds(place: str, count: int, seed: int) -> None:
    """Round after round a forked child takes over, saves and is killed in the save window.

    Forked, because loading an S3 client takes longer than all that it does here. Says how many
    rounds there were, and in how many the child was killed before its save was reported.
    """
    import s3fs  # noqa: F401 - this process only lends it; it makes no connection

    moments = random.Random(seed)
    last, ever, hits = 0, 0, 0
    for number in range(1, count + 1):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            _take_over_on_s3(place, last, ever, writer)
        os.close(writer)
        # The moments are spread over one and a half times the save.
        passing, began, took, completed = moments.randint(1, 2), time.monotonic(), 0.0, 0
        with os.fdopen(reader) as pipe:
            for line in pipe:
                told = json.loads(line)
                assert "failed" not in told, (number, told)
                if "attempt" in told:
                    assert told["attempt"] == number, told
                elif "saving" in told:
                    began = time.monotonic()
                    if passing == 0:
                        time.sleep(moments.uniform(0, 1.5) * took)
                        os.kill(child, signal.SIGKILL)
                    passing -= 1
                else:
                    took = time.monotonic() - began
                    last, ever = told["saved"], ever + 1
                    completed += passing < 0
        hits += completed == 0
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
    say(rounds=count, hits=hits)


def _take_over_on_s3(place: str, at_least: int, ever: int, pipe: int) -> None:
    """Never returns."""
    from trainer.store.s3 import S3Storage

    def tell(**what: object) -> None:
        os.write(pipe, json.dumps(what).encode() + b"\n")

    try:
        storage = S3Storage(place, piece_bytes=5 << 20)
        # Every third attempt uploads in two parts, one of them short.
        take_over(storage, at_least, ever, tell, lambda n: 3000 if n % 3 else 6 << 20)
    except BaseException:  # noqa: BLE001 - a fork must not return into its parent's code
        tell(failed=traceback.format_exc())
    os._exit(1)


def leftovers(storage: Storage) -> list[str]:
    """What killed writes left, beside what has a name of ours."""
    from trainer.store.s3 import S3Storage

    if isinstance(storage, S3Storage):
        return [upload["Key"] for upload in storage._uploads()]
    return [str(path) for path in Path(storage.uri).rglob(".tmp-*")]


def claim(place: str, count: int) -> None:
    store = CheckpointStore(LocalStorage(Path(place)), RUN)
    store.own()
    say(claimed=[store.claim_next("job", 0).attempt for _ in range(count)])


def die_at_each_call(place: str) -> None:
    """For n = 1, 2 ...: a forked process dies at its n-th call, then the place is looked at.

    A call to write is cut in the middle, any other is not made at all.
    """
    root = Path(place)
    os.fsync = lambda _descriptor: None  # a process dies here, not the machine
    kinds: set[str] = set()
    n = 0
    while True:
        n += 1
        attempted = root / str(n)
        _prepare(attempted)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _take_over_and_die(attempted, n, writer)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            told = [json.loads(line) for line in pipe]
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        saved = [one["saved"] for one in told if "saved" in one]
        if code == 0:
            assert saved == [4, 5], told
            break
        assert code == 9, (n, code, told)
        kinds.add(told[-1]["died_at"])
        try:
            _check_after_death(attempted, saved)
        except BaseException as err:
            err.add_note(f"died at call {n}: {told}")
            raise
    say(points=n - 1, kinds=sorted(kinds))


def _prepare(place: Path) -> None:
    """Attempt 1 saved 2, 3 and 4, the last one has rotted, and of 5 it wrote the shards."""
    store = CheckpointStore(LocalStorage(place), RUN)
    with before_each_change(lambda *_: None):
        store.own()
        store.claim_next("job", 0)
        for step in (2, 3, 4):
            save(store, step, 1)
        write_files(store, 5, 1)
    flip_a_byte(store, 4, shard_name(1, 0))


def _take_over_and_die(place: Path, n: int, pipe: int) -> None:
    """Attempt 2: goes back to 3 and saves 4 and 5. Never returns."""
    write = os.write

    def tell(**what: object) -> None:
        write(pipe, json.dumps(what).encode() + b"\n")

    def die(count: int, call: str, args: tuple[Any, ...]) -> None:
        if count == n:
            if call == "write":
                write(args[0], args[1][: len(args[1]) // 2])
            tell(died_at=call)
            os._exit(9)

    store = CheckpointStore(LocalStorage(place), RUN)
    try:
        with before_each_change(die):
            store.own()
            claim = store.claim_next("job", 1)
            store.sweep(claim.attempt)
            good = store.newest_good(claim)
            assert good is not None
            for step in (4, 5):
                save(store, step, claim.attempt, ranks=1)
                tell(saved=step)
                store.retain(claim.attempt, keep_last=KEEP, keep_every=None, resumed_step=good.step)
    except BaseException as err:  # noqa: BLE001 - a fork must not return into its parent's code
        tell(failed=repr(err))
        os._exit(1)
    os._exit(0)


def _check_after_death(place: Path, saved: list[int]) -> None:
    store = CheckpointStore(LocalStorage(place), RUN)
    last = saved[-1] if saved else 3
    assert store.survey().damaged == ()
    assert len(good_steps(store)) >= KEEP
    claim = store.claim_next("job", 2)
    assert claim.resume is not None
    good = store.newest_good(claim)
    assert good is not None
    assert good.step >= last
    assert holds_its_content(store, good)
    assert store.sweep(claim.attempt).warnings == ()
    assert store.survey().torn == ()
    assert list(place.rglob(".tmp-*")) == []
    listed = {
        ref.path(entry.name) for ref in store.survey().complete for entry in ref.manifest.files
    }
    on_disk = {f"{path.parent.name}/{path.name}" for path in place.glob("step-*/*-a*")}
    assert on_disk == listed
    save(store, good.step + 1, claim.attempt)
    newest = store.newest_good()
    assert newest is not None
    assert (newest.step, newest.attempt) == (good.step + 1, claim.attempt)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {
        "train": train,
        "rounds": rounds,
        "claim": claim,
        "die": die_at_each_call,
    }
    commands[sys.argv[1]](sys.argv[2], *map(int, sys.argv[3:]))
