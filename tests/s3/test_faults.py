"""S3 that fails: now and then, for good, in the middle, and for want of fresh credentials."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_until
from tests.s3.proxy import PASSING, FaultyProxy, Request
from tests.s3.server import S3Server
from trainer.spec.errors import StorageError
from trainer.store.checkpoints import CheckpointStore
from trainer.store.s3 import S3Storage

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from store_helpers import RUN, holds_its_content, save

pytestmark = pytest.mark.slow

#: An upload in three parts.
LARGE = bytes(11 << 20)


@pytest.fixture
def proxy(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyProxy]:
    with FaultyProxy(s3.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield proxy


def open_uploads(place: S3Storage) -> list[str]:
    return [upload["Key"] for upload in place._uploads()]


def every_third(faults: tuple[str, ...]) -> Callable[[Request], str | None]:
    """Every third request meets one of the faults, each in its turn."""
    turn = itertools.cycle(faults)
    return lambda request: next(turn) if request.number % 3 == 0 else None


def test_every_third_request_fails_and_nothing_is_lost(
    proxy: FaultyProxy, s3_place: S3Storage
) -> None:
    proxy.plan = every_third(PASSING)
    store = CheckpointStore(s3_place, RUN)
    store.own()
    claim = store.claim_next("job", 0)
    assert claim.attempt == 1
    for step in range(1, 5):
        # Answers that are lost make nobody doubt what was written: a file that is there already
        # would be written again under another name.
        manifest = save(store, step, 1, size=6 << 20 if step == 4 else 3000)
        assert [entry.name for entry in manifest.files] == [
            "shard-a1-r0.bin",
            "shard-a1-r1.bin",
            "index-a1.json",
        ]
        assert store.retain(1, keep_last=2, keep_every=None, resumed_step=None).warnings == ()
    good = store.newest_good()
    assert good is not None
    assert good.step == 4
    assert holds_its_content(store, good, 6 << 20)
    assert open_uploads(s3_place) == []
    assert [ref.step for ref in store.survey().complete] == [4, 3]
    assert store.survey().torn == ()
    assert store.claim_next("job", 1).attempt == 2


@pytest.mark.parametrize("fault", ["lost", "truncated"])
def test_a_claim_whose_answer_is_lost_is_won_by_one(
    fault: str, proxy: FaultyProxy, s3_place: S3Storage
) -> None:
    s3_place.names()
    written = itertools.count()
    proxy.plan = lambda r: fault if r.method == "PUT" and next(written) == 0 else None
    assert s3_place.claim("attempt-1.json", b"mine")
    assert not s3_place.claim("attempt-1.json", b"mine")
    written = itertools.count()
    assert s3_place.replace("attempt-1.json", b"new", expected=b"mine")
    assert s3_place.read("attempt-1.json") == b"new"


def test_a_lost_race_stays_lost_though_the_answer_was_lost(
    proxy: FaultyProxy, s3_place: S3Storage
) -> None:
    assert s3_place.claim("attempt-1.json", b"the same words")
    written = itertools.count()
    proxy.plan = lambda r: "lost" if r.method == "PUT" and next(written) == 0 else None
    assert not s3_place.claim("attempt-1.json", b"the same words")


def test_an_upload_whose_completion_is_lost_is_whole(
    proxy: FaultyProxy, s3_place: S3Storage
) -> None:
    seen = itertools.count()
    proxy.plan = lambda r: (
        "lost" if r.method == "POST" and "uploadId" in r.path and next(seen) == 0 else None
    )
    s3_place.create("a.bin", [LARGE])
    assert s3_place.size("a.bin") == len(LARGE)


@pytest.mark.parametrize("fault", ["unavailable", "reset"])
def test_a_failure_for_good_ends(fault: str, proxy: FaultyProxy, s3_uri: str) -> None:
    place = S3Storage(s3_uri, patience_s=2)
    place.claim("owner.json", b"{}")
    proxy.plan = lambda _request: fault
    before = len(proxy.requests)
    began = time.monotonic()
    with pytest.raises(StorageError, match=f"^{s3_uri} at {proxy.endpoint}"):
        place.read("owner.json")
    assert time.monotonic() - began < 30
    # The client underneath repeats some of them by itself.
    assert 2 <= len(proxy.requests) - before <= 30


def test_a_failing_upload_is_given_up_whole(proxy: FaultyProxy, s3_uri: str) -> None:
    place = S3Storage(s3_uri, patience_s=2, piece_bytes=5 << 20)
    proxy.plan = lambda r: "unavailable" if "partNumber=2" in r.path else None
    with pytest.raises(StorageError, match="ServiceUnavailable"):
        place.create("a.bin", [LARGE])
    assert place.names() == []
    assert open_uploads(place) == []


def test_credentials_that_expire_are_read_again(
    proxy: FaultyProxy,
    s3: S3Server,
    s3_place: S3Storage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "credentials"

    def write(identity: tuple[str, str]) -> None:
        key, secret = identity
        file.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")

    write(s3.owner)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    s3_place.create("a.bin", [LARGE])
    proxy.plan = lambda r: "expired" if r.key_id == s3.owner[0] else None
    refused = len(proxy.requests)
    renewing = threading.Thread(
        target=lambda: (
            wait_until(lambda: len(proxy.requests) > refused + 1, "two refusals"),
            write(s3.renewed),
        )
    )
    renewing.start()
    s3_place.create("b.bin", [LARGE])
    renewing.join(60)
    assert s3_place.names() == ["a.bin", "b.bin"]
    impatient = S3Storage(s3_place.uri, patience_s=2)
    proxy.plan = lambda _request: "expired"
    with pytest.raises(StorageError, match=r"ExpiredToken: .*; renew the credentials"):
        impatient.names()


@pytest.mark.timeout(240)
def test_a_server_that_crashes_amid_an_upload(s3: S3Server, s3_place: S3Storage) -> None:
    """The upload waits for it to come back, and what it has acknowledged before is still there."""
    s3_place.create("before.bin", [LARGE])

    amid, errors = threading.Event(), list[BaseException]()

    def content() -> Iterator[bytes]:
        yield LARGE
        amid.set()
        yield LARGE

    def upload() -> None:
        try:
            s3_place.create("during.bin", content())
        except StorageError as err:
            errors.append(err)

    uploading = threading.Thread(target=upload)
    uploading.start()
    assert amid.wait(60)
    s3.kill()
    # Here: it would die with a thread that has started it.
    s3.start()
    uploading.join(100)
    assert errors == []
    assert s3_place.size("during.bin") == 2 * len(LARGE)
    assert s3_place.read("before.bin") == LARGE
    assert open_uploads(s3_place) == []
