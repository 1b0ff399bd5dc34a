"""Saving and restoring on real ranks, with the storage, the files or a newer attempt against it."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dist_helpers import Run, lone_rank, planned
from safetensors.torch import save_file

from trainer.agree import Agreement
from trainer.checkpoint.initial import load_initial_weights
from trainer.spec.errors import CorruptCheckpoint, IncompatibleCheckpoint, NotFound
from trainer.store.checkpoints import CheckpointStore
from trainer.store.storage import open_storage
from trainer.factories import build_data, build_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EVERY_TWO = {"checkpoint": {"save_interval": 2}}


def full_disk(steps: tuple[int, ...], rank: int) -> None:
    """On rank 1 no file of the checkpoints of these steps can be opened."""

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and any(f"step-{step:08d}" in str(arguments[0]) for step in steps):
            raise OSError(28, "No space left on device")

    if rank == 1:
        sys.addaudithook(on_event)


def test_a_periodic_save_may_fail_once(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO)
    with run.start(prepare=partial(full_disk, (2,))) as ranks:
        assert ranks.wait() == [0, 0], ranks.logs()
        assert "step 2 NOT saved, training goes on" in ranks.logs()
        assert ranks.logs().count("step 2 is not saved so far, and is tried again") == 1
    (failed,) = run.events("save_failed")
    assert failed["step"] == 2
    assert "No space left on device" in failed["reason"]
    assert run.saved_steps() == [4, 6]
    # What the other ranks had written of it is gone again.
    assert not list((run.dir.path / "checkpoints" / "step-00000002").glob("*"))


def test_two_failed_saves_in_a_row_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO)
    with run.start(prepare=partial(full_disk, (4, 6))) as ranks:
        assert ranks.wait() == [6, 6]
        assert {report.error for report in ranks.reports()} == {"StorageError"}
        assert {report.last_step for report in ranks.reports()} == {6}
    assert run.saved_steps() == [2]
    assert run.train() == [0, 0]
    assert [event["step"] for event in run.events("restored")] == [2]


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    run = Run(tmp_path, 2)
    with run.start(prepare=partial(full_disk, (6,))) as ranks:
        assert ranks.wait() == [6, 6]
    assert run.saved_steps() == []


def test_an_older_attempt_steps_back_for_a_newer_one(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO)
    with run.start({"train": {"max_steps": 10**6}}) as ranks:
        # The save of step 4 has waited for that of step 2 to be committed.
        ranks.wait_for_step(5)
        store = CheckpointStore(open_storage(str(run.dir.path / "checkpoints")), "core-1")
        resume = store.claim_next(None, None).resume
        assert resume is not None
        assert ranks.wait() == [93, 93]
        assert {report.error for report in ranks.reports()} == {"Fenced"}


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path, 2, EVERY_TWO)
    assert run.train() == [0, 0]
    before = run.metrics()
    directory = run.dir.path / "checkpoints" / "step-00000006"
    shard = directory / "shard-a1-r1.bin"
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    assert run.train({"train": {"max_steps": 8}}) == [0, 0]
    (skipped,) = run.events("checkpoint_skipped")
    assert skipped["step"] == 6
    assert "shard-a1-r1.bin" in skipped["reason"]
    assert [event["step"] for event in run.events("restored")] == [4]
    after = run.metrics()
    assert [record["step"] for record in after] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [record["attempt"] for record in after] == [1] * 4 + [2] * 4
    assert after[:4] == before[:4]
    assert run.saved_steps() == [2, 4, 6, 8]


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    run = Run(tmp_path, 1)
    assert run.train({"train": {"max_steps": 1}}) == [0]
    for change, message in [
        ({"action_width": 24}, "head.action.weight is (16, 4) torch.float32 in the checkpoint"),
        ({"action_layers": 2}, "optimizer group 'action_model.decay'"),
    ]:
        options: dict[str, Any] = {**planned(1).spec.model.options, **change}
        with run.start({"model": {"options": options}}) as ranks:
            assert ranks.wait() == [6]
            (report,) = ranks.reports()
        assert report.error == "IncompatibleCheckpoint"
        assert message in (report.message or "")
    assert run.saved_steps() == [1]


# -- Weights to start from ---------------------------------------------------------------------


def test_a_run_starts_from_given_weights_once(tmp_path: Path) -> None:
    source = Run(tmp_path / "source", 2)
    assert source.train({"train": {"max_steps": 2}}) == [0, 0]
    weights = {
        name.removeprefix("model."): tensor
        for name, tensor in source.checkpoint(2).tensors.items()
        if name.startswith("model.")
    }
    save_file(weights, tmp_path / "weights.safetensors")
    # As VITRA keeps them, each under what wrapped the model.
    wrapped = {f"module.{name}": tensor for name, tensor in weights.items()}
    torch.save({"model": wrapped, "epoch": 3}, tmp_path / "weights.pt")
    directory = source.dir.path / "checkpoints" / "step-00000002"
    # A rate so small that a step changes nothing of the weights but the last bit.
    still = {"train": {"max_steps": 1, "learning_rate": 1e-12}}
    for number, place in enumerate(
        [directory, tmp_path / "weights.pt", tmp_path / "weights.safetensors"]
    ):
        run = Run(tmp_path / str(number), 1, still, {"checkpoint": {"init_from": str(place)}})
        assert run.train() == [0]
        saved = run.checkpoint(1)
        for name, tensor in weights.items():
            torch.testing.assert_close(saved.tensors[f"model.{name}"], tensor, rtol=0, atol=1e-9)
        # Weights alone: optimizer, schedule and position are new.
        counters = {float(t) for name, t in saved.tensors.items() if name.endswith(".step")}
        assert counters == {1.0}
        assert saved.state["schedule"] == {"last_step": 1}
        assert saved.manifest.samples_seen == 16
    # Once the run has a checkpoint of its own, nobody asks for the weights any more.
    (tmp_path / "weights.safetensors").unlink()
    assert run.train({"train": {"max_steps": 2}}) == [0]


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    good = {"backbone.x": torch.ones(2)}
    save_file(good, tmp_path / "other.safetensors")
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\0\0")
    (tmp_path / "empty").mkdir()
    plan = planned(1)
    model = build_model(plan.spec, build_data(plan.spec), torch.device("cpu"))
    strategy: Any = SimpleNamespace(named_state=model.state_dict)
    for name, error in [
        ("other.safetensors", IncompatibleCheckpoint),
        ("torn.safetensors", CorruptCheckpoint),
        ("empty", NotFound),
        ("missing", NotFound),
    ]:
        place = tmp_path / name
        with pytest.raises(error, match=re.escape(f"checkpoint.init_from={place}")):
            load_initial_weights(str(place), strategy, lone_rank(), Agreement(None))
    run = Run(tmp_path / "run", 1, {"checkpoint": {"init_from": str(tmp_path / "empty")}})
    with run.start() as ranks:
        assert ranks.wait() == [4]
        (report,) = ranks.reports()
    assert report.error == "NotFound"
    assert f"checkpoint.init_from={tmp_path / 'empty'}" in (report.message or "")
    assert run.saved_steps() == []
