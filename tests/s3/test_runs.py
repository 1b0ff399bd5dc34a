"""Whole runs with their checkpoints on S3."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.conftest import Vitra, tree, wait_until
from tests.e2e.runs import Run, results, spec
from tests.s3.fixtures import copied
from tests.s3.proxy import FaultyProxy
from tests.s3.server import S3Server
from trainer.store.s3 import S3Storage

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def everything(uri: str) -> list[str]:
    """The names of all objects under a place, and of its open uploads."""
    storage = S3Storage(uri)
    files = [name for name in storage.names() if not name.endswith("/")]
    for directory in (name for name in storage.names() if name.endswith("/")):
        files += [directory + name for name in storage.names(directory[:-1])]
    return files + [upload["Key"] for upload in storage._uploads()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the undisturbed run, on disk."""
    run = Run(tmp_path_factory.mktemp("whole"), spec(2))
    run.finish()
    return run.results()


def test_disturbed_in_every_way_equals_whole_on_disk(
    whole: dict[str, Any], s3: S3Server, s3_uri: str, tmp_path: Path
) -> None:
    """Requests fail all the time, a process is killed, then the server is, then keys expire."""
    credentials = tmp_path / "credentials"

    def write_key(identity: tuple[str, str]) -> None:
        key, secret = identity
        text = f"[default]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n"
        credentials.with_suffix(".new").write_text(text)
        credentials.with_suffix(".new").replace(credentials)

    write_key(s3.owner)
    S3Storage(f"{s3_uri}/equal-10").claim("owner.json", b'{"run_id": "a neighbour"}')
    place = f"{s3_uri}/equal-1"
    with FaultyProxy(s3.endpoint) as proxy:
        env = {
            **s3.environ(endpoint=proxy.endpoint),
            "AWS_SHARED_CREDENTIALS_FILE": str(credentials),
        }
        # What is in the environment cannot be renewed.
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            env[name] = ""
        changes = {"uri": place, "save_interval": 4, "keep_last": 3}
        run = Run(tmp_path / "run", spec(2, checkpoint=changes), env=env)
        faults = ("unavailable", "reset", "lost", "truncated")
        proxy.plan = lambda r: faults[r.number // 7 % 4] if r.number % 7 == 0 else None
        run.kill_at(random.Random(7).randint(10, 16), random.Random(7))

        process = run.start()
        wait_until(lambda: newest_saved(run) >= 24, "the checkpoint of step 24")
        s3.kill()
        time.sleep(0.5)
        s3.start()
        wait_until(lambda: newest_saved(run) >= 32, "the checkpoint of step 32")
        refused = s3.owner[0]
        proxy.plan = lambda r: "expired" if r.key_id == refused else None
        asked = len(proxy.requests)
        wait_until(lambda: len(proxy.requests) > asked + 3, "refusals")
        write_key(s3.renewed)
        assert process.wait(timeout=240) == 0, run.terminal()[-3000:]

    assert run.events("save_failed") == []
    found = results(run.dir, copied(place, tmp_path / "copy"))
    assert found["step"] == 60
    assert found["metrics"] == whole["metrics"]
    assert found["samples"] == whole["samples"]
    assert found["state"] == whole["state"]
    # Exactly what was promised is there, and the neighbour.
    steps = {name.partition("/")[0] for name in everything(place) if "/" in name}
    assert steps == {"step-00000052", "step-00000056", "step-00000060"}
    assert len(everything(place)) == 1 + 2 + 3 * 4
    assert everything(f"{s3_uri}/equal-10") == ["owner.json"]
    secrets = [s3.owner[1].encode(), s3.renewed[1].encode()]
    for _, content in tree(run.dir).values():
        assert not any(secret in content for secret in secrets)


def newest_saved(run: Run) -> int:
    return max((event["step"] for event in run.events("saved")), default=0)


# -- Commands ----------------------------------------------------------------------------------


def test_commands_take_a_url(vitra: Vitra, s3: S3Server, s3_uri: str, tmp_path: Path) -> None:
    vitra.environ = s3.environ()
    vitra.spec(
        train__max_steps=6,
        data__num_workers=2,
        checkpoint__uri=f"{s3_uri}/{{run_id}}",
        checkpoint__save_interval=2,
    )
    submitted = vitra("submit", "spec.yaml", "--local", "--json").json
    place = f"{s3_uri}/{submitted['run_id']}"
    for what in (submitted["run_id"], place, f"{place}/"):
        listed = vitra("checkpoints", what, "--verify", "--json").json
        assert [row["step"] for row in listed["complete"]] == [6, 4]
    vitra("export", place, "--step", "4", "--to", "weights.safetensors")
    with safe_open(tmp_path / "weights.safetensors", framework="np") as file:
        assert len(file.keys()) > 10
    status = vitra("status", submitted["run_id"], "--json").json
    assert status["last_checkpoint_step"] == 6

    damage = S3Storage(place)
    name = "step-00000006/shard-a1-r0.bin"
    data = bytearray(damage.read(name))
    data[100] ^= 1
    damage.remove(name)
    damage.create(name, [data])
    assert "digest" in vitra("checkpoints", place, "--verify", code=6).stdout
    assert "there is step 4" in vitra("export", place, "--to", "w", code=6).stderr
    resumed = vitra(
        "resume", submitted["run_id"], "--local", "--json", "-o", "train.max_steps=8"
    ).json
    assert resumed["run_id"] == submitted["run_id"]
    events = (Path(submitted["run_dir"]) / "events.jsonl").read_text().splitlines()
    skipped = [e for e in map(json.loads, events) if e["event"] == "checkpoint_skipped"]
    assert [(e["step"], "digest" in e["reason"]) for e in skipped] == [(6, True)]

    # Another run starts from its weights, and may not have its place.
    vitra.spec(
        train__max_steps=1,
        checkpoint__uri=f"{s3_uri}/{{run_id}}",
        checkpoint__init_from=f"{place}/step-00000008",
    )
    vitra("submit", "spec.yaml", "--local")
    vitra.spec(train__max_steps=1, checkpoint__uri=place)
    refused = vitra("submit", "spec.yaml", "--local", code=6)
    assert submitted["run_id"] in refused.stderr


def test_what_is_sharded_comes_back_tensor_by_tensor(
    vitra: Vitra, s3: S3Server, s3_uri: str, tmp_path: Path
) -> None:
    vitra.environ = s3.environ()
    found: list[dict[str, Any]] = []
    for uri in (f"{s3_uri}/{{run_id}}", "disk/{run_id}"):
        vitra.spec(
            train__max_steps=4,
            train__strategy="fsdp-full",
            resources__tasks_per_node=2,
            checkpoint__uri=uri,
            checkpoint__save_interval=2,
        )
        run_id = vitra("submit", "spec.yaml", "--local", "--json").json["run_id"]
        # The last two steps start from what the first two have saved.
        vitra("resume", run_id, "--local", "-o", "train.max_steps=6", "--allow-change")
        vitra("export", run_id, "--to", f"{run_id}.safetensors")
        with safe_open(tmp_path / f"{run_id}.safetensors", framework="np") as file:
            found.append({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
    on_s3, on_disk = found
    assert on_s3.keys() == on_disk.keys()
    for name, tensor in on_disk.items():
        assert tensor.size > 0
        assert (on_s3[name] == tensor).all(), name


REFUSED: dict[str, tuple[dict[str, str], str]] = {
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "nonsense-marker"}, "SignatureDoesNotMatch"),
    "reader": (
        {"AWS_ACCESS_KEY_ID": S3Server.reader[0], "AWS_SECRET_ACCESS_KEY": S3Server.reader[1]},
        "needs to read, write, list and delete",
    ),
    "nobody there": ({"AWS_ENDPOINT_URL": "http://127.0.0.1:1"}, "AWS_ENDPOINT_URL"),
}


@pytest.mark.parametrize(("environ", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_a_place_that_cannot_be_used_is_refused_at_submit(
    vitra: Vitra, s3: S3Server, s3_uri: str, environ: dict[str, str], named: str
) -> None:
    vitra.environ = {**s3.environ(), **environ}
    vitra.spec(checkpoint__uri=s3_uri)
    before = tree(vitra.directory)
    answer = vitra("submit", "spec.yaml", "--local", code=6)
    assert s3_uri in answer.stderr
    assert named in answer.stderr
    assert "marker" not in answer.stderr
    assert tree(vitra.directory).keys() == before.keys()


def test_a_bucket_that_is_not_there_is_refused_at_submit(vitra: Vitra, s3: S3Server) -> None:
    vitra.environ = s3.environ()
    vitra.spec(checkpoint__uri="s3://absent-bucket/{run_id}")
    answer = vitra("submit", "spec.yaml", "--local", code=6)
    assert "s3://absent-bucket/tiny-" in answer.stderr
    assert "make the bucket" in answer.stderr


def test_weights_that_are_not_there_are_refused_at_submit(
    vitra: Vitra, s3: S3Server, s3_uri: str
) -> None:
    vitra.environ = s3.environ()
    source = f"{s3_uri}/absent.safetensors"
    vitra.spec(checkpoint__uri=f"{s3_uri}/{{run_id}}", checkpoint__init_from=source)
    answer = vitra("submit", "spec.yaml", "--local", code=4)
    assert f"checkpoint.init_from={source}" in answer.stderr
