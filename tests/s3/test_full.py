"""A bucket with no room left: what was saved stays, and the run says that no more is."""

from __future__ import annotations

import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Vitra, wait_until
from tests.contract.live import LiveRun, runs_into_a_full_place
from tests.s3.proxy import FaultyProxy
from tests.s3.server import S3Server, weed_command
from trainer.spec.errors import StorageError
from trainer.store.checkpoints import CheckpointStore
from trainer.store.s3 import S3Storage
from trainer.store.s3_client import S3Client

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from store_helpers import RUN, holds_its_content, save

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZE = 2 << 20


def administer(server: S3Server, command: str) -> str:
    """What the server's own shell answers."""
    weed = weed_command()
    assert weed is not None
    done = subprocess.run(
        [weed, "shell", f"-master=127.0.0.1:{server.port + 1}"],
        input=f"lock\n{command}\nunlock\n",
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_a_bucket_over_its_quota(s3: S3Server) -> None:
    """The server itself refuses to write: first a whole save fails, then all goes on."""
    bucket = f"small-{secrets.token_hex(4)}"
    S3Client("s3://", {}, 30).call("create_bucket", Bucket=bucket)
    place = S3Storage(f"s3://{bucket}/place", patience_s=2)
    store = CheckpointStore(place, RUN)
    store.own()
    store.claim_next("job", 0)
    for step in (1, 2):
        save(store, step, 1, size=SIZE)

    administer(s3, f"s3.bucket.quota -name={bucket} -op=set -sizeMB=1")
    enforce = "s3.bucket.quota.enforce -apply"
    # It is told how large the bucket is every few seconds.
    wait_until(lambda: f"{bucket} to read only" in administer(s3, enforce), "the quota")
    with pytest.raises(StorageError, match=f"^s3://{bucket}/place at {s3.endpoint}: "):
        save(store, 3, 1, size=SIZE)
    assert store.discard(3, 1) == ()
    good = store.newest_good()
    assert good is not None
    assert good.step == 2
    assert holds_its_content(store, good, SIZE)
    assert place._uploads() == []

    freed = administer(s3, f"s3.bucket.quota -name={bucket} -op=remove")
    assert f"cleared read-only for bucket {bucket}" in freed
    save(store, 3, 1, size=SIZE)
    assert [ref.step for ref in store.survey().complete] == [3, 2, 1]


def test_a_run_whose_bucket_is_full(vitra: Vitra, s3: S3Server, s3_uri: str) -> None:
    with FaultyProxy(s3.endpoint) as proxy:

        def fill() -> None:
            proxy.plan = lambda r: "full" if r.method in ("PUT", "POST") else None

        def free() -> None:
            proxy.plan = lambda _request: None

        vitra.environ = s3.environ(endpoint=proxy.endpoint)
        live = LiveRun(vitra, checkpoint__uri=f"{s3_uri}/{{run_id}}")
        runs_into_a_full_place(live, fill, free, "XMinioStorageFull")
