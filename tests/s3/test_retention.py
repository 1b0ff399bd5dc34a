"""What is kept on S3, at every moment, and whose."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import wait_until
from trainer.store.checkpoints import CheckpointStore
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest
from trainer.store.s3 import S3Storage

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from store_helpers import RUN, save

pytestmark = pytest.mark.slow

KEEP = 3


def whole_checkpoints(place: S3Storage) -> dict[str, bool] | None:
    """The manifests that are there, and whether all their files are; None if that just changed."""
    before = manifests(place)
    whole: dict[str, bool] = {}
    for directory in before:
        try:
            content = CheckpointManifest.from_bytes(place.read(f"{directory}/{MANIFEST_NAME}"))
        except FileNotFoundError:
            return None
        sizes = {entry.name: entry.size_bytes for entry in content.files}
        whole[directory] = place.sizes(directory, sizes) == sizes
    return whole if manifests(place) == before else None


def manifests(place: S3Storage) -> list[str]:
    directories = [name[:-1] for name in place.names() if name.endswith("/")]
    return [one for one in directories if MANIFEST_NAME in place.names(one)]


def test_three_of_twelve_beside_a_neighbour(s3_uri: str) -> None:
    neighbour = CheckpointStore(S3Storage(f"{s3_uri}/run-10"), "neighbour")
    neighbour.own()
    neighbour.claim_next("job", 0)
    for step in range(1, 5):
        save(neighbour, step, 1)

    store = CheckpointStore(S3Storage(f"{s3_uri}/run-1"), RUN)
    store.own()
    store.claim_next("job", 0)
    store.storage.create("step-00000001/notes.txt", [b"mine"])
    saved: list[int] = []
    looks: list[tuple[int, int]] = []
    done = threading.Event()

    def poll() -> None:
        place = S3Storage(f"{s3_uri}/run-1")
        while not done.is_set():
            promised = min(KEEP, len(saved))
            if (found := whole_checkpoints(place)) is not None:
                assert all(found.values())
                looks.append((promised, len(found)))
            done.wait(0.01)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        for step in range(1, 13):
            save(store, step, 1)
            saved.append(step)
            removal = store.retain(1, keep_last=KEEP, keep_every=None, resumed_step=None)
            assert removal.warnings == ()
            seen = len(looks)
            if step % 4 == 0:
                wait_until(lambda seen=seen: len(looks) > seen, "a look")
    finally:
        done.set()
        poller.join()
    assert all(found >= promised for promised, found in looks)
    assert max(found for _, found in looks) >= KEEP
    assert [ref.step for ref in store.survey().complete] == [12, 11, 10]
    assert manifests(S3Storage(f"{s3_uri}/run-1")) == [f"step-{n:08d}" for n in (10, 11, 12)]
    assert store.storage.read("step-00000001/notes.txt") == b"mine"
    assert [ref.step for ref in neighbour.survey().complete] == [4, 3, 2, 1]


def test_back_to_ten_with_eleven_and_twelve_there(s3_uri: str) -> None:
    """Both are trained and saved again, and nothing of the first time is left."""
    store = CheckpointStore(S3Storage(s3_uri), RUN)
    store.own()
    store.claim_next("job", 0)
    for step in (10, 11, 12):
        save(store, step, 1)
    claim = store.claim_next("job", 1, at_most_step=10)
    assert claim.resume == (10, 1)
    good = store.newest_good(claim)
    assert good is not None
    assert (good.step, good.attempt) == (10, 1)
    for step in (11, 12):
        save(store, step, 2)
        newest = store.survey().newest
        assert newest is not None
        assert (newest.step, newest.attempt) == (step, 2)
        names = store.storage.names(f"step-{step:08d}")
        assert sorted(names) == sorted(
            [MANIFEST_NAME, *(entry.name for entry in newest.manifest.files)]
        )
    found = [(ref.step, ref.attempt) for ref in store.survey().complete]
    assert found == [(12, 2), (11, 2), (10, 1)]
