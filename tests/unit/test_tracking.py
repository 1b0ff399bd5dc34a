"""What a tracker is given: VITRA's names, and a configuration without secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.load import load_spec
from launcher.planner import plan
from tests.conftest import tiny_spec
from trainer.metrics import tracker_metrics
from trainer.records import RunRecords
from trainer.spec.plan import Plan
from trainer.spec.ranks import RankInfo
from trainer.spec.rundir import RunDir
from trainer.tracking import start_tracker
from trainer.wandb_sender import tracker_config

RECORD: dict[str, Any] = {
    "step": 7,
    "epoch": 1,
    "loss": 1 / 3,
    "lr": {"backbone": 1e-5, "action_model": 2e-5},
    "grad_norm": 0.5,
    "step_time_s": 0.25,
    "data_wait_s": 0.125,
    "memory_bytes": 3 * 2**29,
    "samples_seen": 56,
    "attempt": 2,
}


def planned(tmp_path: Path, **changes: object) -> Plan:
    path = tmp_path / "spec.yaml"
    path.write_text(tiny_spec(**changes))
    spec = load_spec(path, [], environ={}).spec
    return plan(spec, run_id="tiny-1", run_dir=str(tmp_path / "run"), base_dir=str(tmp_path))


def test_the_names_of_vitras_dashboards() -> None:
    assert tracker_metrics(RECORD, global_batch_size=8) == {
        "VLA Train/Step": 7,
        "VLA Train/Epoch": 1,
        "VLA Train/Loss": 1 / 3,
        "VLA Train/Loss (Raw)": 1 / 3,
        "VLA Train/Backbone Learning Rate": 1e-5,
        "VLA Train/Action Model Learning Rate": 2e-5,
        "VLA Train/Step Time": 0.25,
        "Other/Gradient Norm": 0.5,
        "Other/Data Wait": 0.125,
        "Other/Memory (GiB)": 1.5,
        "Other/Samples Seen": 56,
        "Other/Samples per Second": 32.0,
        "Other/Attempt": 2,
    }


def test_a_model_without_a_backbone_and_a_step_that_took_no_time() -> None:
    record = {**RECORD, "lr": {"action_model": 2e-5}, "step_time_s": 0.0}
    names = tracker_metrics(record, global_batch_size=8).keys()
    assert "VLA Train/Backbone Learning Rate" not in names
    assert "VLA Train/Action Model Learning Rate" in names
    assert "Other/Samples per Second" not in names


def test_the_configuration_holds_the_spec_and_the_plans_numbers(tmp_path: Path) -> None:
    config = tracker_config(planned(tmp_path))
    assert config["train"]["learning_rate"] == 1e-3
    assert config["data"]["options"]["samples"] == 64
    assert config["plan"]["world_size"] == 2
    assert config["plan"]["grad_accumulation_steps"] == 2


def test_the_configuration_holds_nothing_that_could_be_secret(tmp_path: Path) -> None:
    config = tracker_config(
        planned(
            tmp_path,
            model__kind="own.module:factory",
            model__options={"hub_token": "marker", "nested": [{"apiKey": "marker"}], "width": 3},
            resources__env={"SOME_PLACE": "marker", "WANDB_API_KEY": None},
            resources__setup=["export TOKEN=marker"],
            checkpoint__storage_options={"client_kwargs": {"endpoint_url": "http://marker"}},
        )
    )
    assert "marker" not in str(config)
    assert config["model"]["options"]["width"] == 3


@pytest.mark.parametrize(
    ("wandb", "rank"),
    [(None, 0), ({"mode": "disabled"}, 0), ({"mode": "offline"}, 1), ({"mode": "online"}, 3)],
)
def test_nothing_is_started_where_nothing_is_to_be_sent(
    tmp_path: Path, wandb: dict[str, Any] | None, rank: int
) -> None:
    """Local rank 0 of the second node is not the primary rank of the run."""
    run_dir = RunDir(tmp_path)
    ranks = RankInfo(
        rank=rank,
        world_size=4,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        run_id="tiny-1",
        attempt=1,
    )
    records = RunRecords(run_dir, ranks, log_interval=1, sample_ids=False)
    own = planned(tmp_path, tracking__wandb=wandb)
    assert start_tracker(run_dir, own, ranks, records, {}) is None
    assert not run_dir.attempts.exists()
    assert not run_dir.events.exists()
