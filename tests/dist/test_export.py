"""Weights as one file: the checkpoint's values bit for bit, from any world, and loadable again."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_helpers import Run, lone_rank, on_ranks, planned
from safetensors import safe_open
from safetensors.torch import load_file
from test_reshard import expected, save_in, state

from tests.conftest import Vitra, VitraServer
from trainer.agree import Agreement
from trainer.checkpoint.initial import load_initial_weights
from trainer.export import write_weights
from trainer.spec.errors import IncompatibleCheckpoint, StorageError
from trainer.store.checkpoints import CheckpointRef, file_path
from trainer.store.manifest import CheckpointManifest, Digest, FileEntry
from trainer.store.storage import LocalStorage
from trainer.strategies.build import get_train_strategy
from trainer.factories import build_data, build_model

pytestmark = pytest.mark.timeout(120)

STEPS = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks have trained three steps, and saved the second and the third."""
    run = Run(tmp_path_factory.mktemp("two"), 2)
    codes = run.train({"train": {"max_steps": STEPS}, "checkpoint": {"save_interval": 2}})
    assert codes == [0, 0]
    return run


@pytest.fixture(scope="module")
def exported(
    run: Run, tmp_path_factory: pytest.TempPathFactory, vitra_server: VitraServer
) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint's weights, and what the command said of them."""
    vitra = Vitra(tmp_path_factory.mktemp("exported"), vitra_server)
    place = run.dir.path / "checkpoints"
    answer = vitra("export", place, "--to", "weights.safetensors", "--json")
    return vitra.directory / "weights.safetensors", answer.json


def weights(run: Run, step: int) -> dict[str, torch.Tensor]:
    tensors = run.checkpoint(step).tensors
    return {n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        t.dtype == other[n].dtype and t.shape == other[n].shape and bits(t) == bits(other[n])
        for n, t in one.items()
    )


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.slow
def test_the_newest_by_default(run: Run, exported: tuple[Path, dict[str, Any]]) -> None:
    file, facts = exported
    found = load_file(file)
    assert same(found, weights(run, STEPS))
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    assert (facts["step"], facts["attempt"], facts["run_id"]) == (STEPS, 1, "core-1")
    assert (facts["file"], facts["size_bytes"]) == (str(file), file.stat().st_size)
    assert facts["tensors"] == len(found)
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()
    assert [path.name for path in file.parent.iterdir()] == [file.name]
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}


@pytest.mark.slow
def test_a_named_step_replaces_a_file_when_told_to(
    vitra: Vitra, run: Run, exported: tuple[Path, dict[str, Any]]
) -> None:
    words = ("export", run.dir.path / "checkpoints", "--to", "mine", "--force", "--step")
    file = vitra.directory / "mine"
    file.write_text("mine")
    vitra(*words, "2")
    assert same(load_file(file), weights(run, 2))
    assert not same(weights(run, 2), weights(run, STEPS))
    # Nothing of run or time is in it: the same weights are the same bytes.
    vitra(*words, str(STEPS))
    assert file.read_bytes() == exported[0].read_bytes()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(vitra: Vitra, run: Run) -> None:
    place = str(run.dir.path / "checkpoints")
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)); "
        f"sys.argv = ['vitra', 'export', {place!r}, '--to', 'x']; "
        "from launcher.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", limited],
        cwd=vitra.directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 6, done.stderr
    assert "cannot write" in done.stderr
    assert list(vitra.directory.iterdir()) == []


# -- What a strategy shards --------------------------------------------------------------------


def save_sharded(rank: int, directory: str) -> None:
    tensors = {f"model.{n}": t for n, t in state(sharded=True).items()}
    tensors |= {f"model.{n}": t for n, t in expected().items()}
    save_in(directory, rank, tensors | {"optimizer.x": torch.ones(3)})
    if dist.is_initialized():
        dist.barrier()


def committed(root: Path) -> CheckpointRef:
    """A checkpoint of what `save_in` wrote into the directory of step 1."""
    directory = root / "step-00000001"
    (directory / "index.json").rename(directory / "index-a1.json")
    document = json.loads((directory / "index-a1.json").read_text())
    document["state"] = {}
    (directory / "index-a1.json").write_text(json.dumps(document))
    (directory / "files.json").unlink()
    files = []
    for path in sorted(directory.iterdir()):
        digest = Digest([path.read_bytes()])
        files.append(FileEntry(name=path.name, size_bytes=digest.size_bytes, digest=digest.text))
    return CheckpointRef(
        CheckpointManifest(
            run_id="r",
            step=1,
            epoch=0,
            samples_seen=1,
            attempt=1,
            world_size=4,
            strategy="fsdp-full",
            spec_digest="",
            files=tuple(files),
            created_at="",
        )
    )


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalStorage, CheckpointRef]:
    """A checkpoint of parameters that four ranks held a part of each, and of tensors of all kinds."""
    root = tmp_path_factory.mktemp("sharded")
    (root / "step-00000001").mkdir()
    on_ranks(4, save_sharded, str(root / "step-00000001"))
    return LocalStorage(root), committed(root)


@pytest.mark.slow
def test_shards_of_four_ranks_become_whole(
    sharded: tuple[LocalStorage, CheckpointRef], tmp_path: Path
) -> None:
    storage, ref = sharded
    assert len([e for e in ref.manifest.files if e.name.startswith("shard-")]) == 4
    facts = write_weights(storage, ref, str(tmp_path / "x"))
    found = load_file(tmp_path / "x")
    assert same(found, {**state(sharded=False), **expected()})
    assert facts["size_bytes"] == (tmp_path / "x").stat().st_size
    # Every tensor lies at a multiple of its width, so that a mapped file can be used as it is.
    data = (tmp_path / "x").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 8 == 0
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            assert entry["data_offsets"][0] % found[name].itemsize == 0, name


@pytest.mark.slow
def test_a_checkpoint_that_is_deleted_meanwhile(
    sharded: tuple[LocalStorage, CheckpointRef], tmp_path: Path
) -> None:
    storage, ref = sharded

    class Vanishing(LocalStorage):
        def read_into(self, name: str, offset: int, target: memoryview) -> int:
            if name == file_path(1, "shard-3.bin"):
                raise FileNotFoundError(name)
            return super().read_into(name, offset, target)

    with pytest.raises(StorageError, match="deleted while it was read"):
        write_weights(Vanishing(Path(storage.uri)), ref, str(tmp_path / "x"))


def save_complex(rank: int, directory: str) -> None:
    save_in(directory, rank, {"model.waves": torch.ones(2, dtype=torch.complex64)})


@pytest.mark.slow
def test_a_dtype_that_the_format_has_not(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").mkdir()
    on_ranks(1, save_complex, str(tmp_path / "step-00000001"))
    with pytest.raises(IncompatibleCheckpoint, match=r"waves is torch\.complex64"):
        write_weights(LocalStorage(tmp_path), committed(tmp_path), str(tmp_path / "x"))


# -- And back ----------------------------------------------------------------------------------


def started_from(rank: int, file: str) -> dict[str, torch.Tensor]:
    """The weights of a rank that begins with a file."""
    del rank
    plan = planned(1, {"train": {"max_steps": 1}})
    model: Any = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    train = plan.spec.train
    strategy = get_train_strategy(
        "ddp",
        vla=model,
        device_id=0,
        stage="train",
        epochs=None,
        max_steps=1,
        global_batch_size=plan.global_batch_size,
        per_device_batch_size=plan.per_device_batch_size,
        learning_rate=train.learning_rate,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        lr_scheduler_type=train.lr_scheduler_type,
        warmup_ratio=train.warmup_ratio,
    )
    strategy.run_setup(Path("/nowhere"), 40)
    load_initial_weights(file, strategy, lone_rank(), Agreement(None))
    return {name: tensor.clone() for name, tensor in strategy.named_state().items()}


@pytest.mark.slow
def test_a_run_starts_from_it_with_every_bit(
    run: Run, exported: tuple[Path, dict[str, Any]]
) -> None:
    (found,) = on_ranks(1, started_from, str(exported[0]))
    assert same(found, weights(run, STEPS))


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
