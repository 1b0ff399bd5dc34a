"""Any object store through fsspec alone: here S3 without what we know of S3."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.spec.errors import StorageError
from trainer.store.checkpoints import CheckpointStore
from trainer.store.fsspec_storage import FsspecStorage

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from store_helpers import RUN, flip_a_byte, holds_its_content, save

pytestmark = pytest.mark.slow


def test_saves_claims_and_retention(s3_uri: str) -> None:
    place = FsspecStorage(s3_uri)
    place.probe()
    assert place.names() == []
    store = CheckpointStore(place, RUN)
    store.own()
    assert store.claim_next("job", 0).attempt == 1
    for step in (1, 2, 3):
        save(store, step, 1)
        assert store.retain(1, keep_last=2, keep_every=None, resumed_step=None).warnings == ()
    # What another process writes shows at once, and it shows what was written here.
    other = CheckpointStore(FsspecStorage(s3_uri), RUN)
    flip_a_byte(other, 3, "shard-a1-r0.bin")
    claim = other.claim_next("job", 1)
    good = store.newest_good(claim)
    assert good is not None
    assert good.step == 2
    assert holds_its_content(store, good)
    assert not place.claim("attempt-2.json", b"mine")


def test_an_error_amid_the_content_leaves_no_file(s3_uri: str) -> None:
    def content() -> Iterator[bytes]:
        yield bytes(6 << 20)
        raise OSError("the disk that it comes from")

    place = FsspecStorage(s3_uri)
    with pytest.raises(OSError, match="the disk"):
        place.create("step-1/a", content())
    assert place.names("step-1") == []


def test_what_it_says_of_a_missing_bucket(s3_uri: str) -> None:
    del s3_uri  # for its environment
    with pytest.raises(StorageError, match=r"^s3://absent-bucket/x: .*bucket"):
        FsspecStorage("s3://absent-bucket/x").probe()
