"""A rank that finds itself in another world than the planned one says so at once, with both."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launcher.planner import plan
from tests.conftest import tiny_spec
from trainer.spec.errors import RankMismatch
from trainer.spec.ranks import LAUNCH_VARIABLES, RankInfo
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.state import TrainState
from trainer.stop import StopFlag
from trainer.watchdog import Pulse
from trainer.worker import run

ENVIRON = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "1",
    "VITRA_RUN_ID": "a-1",
    "VITRA_RUN_DIR": "/nowhere",
    "VITRA_ATTEMPT": "1",
}


def test_another_world_than_planned(tmp_path: Path) -> None:
    """Before any rendezvous, which would wait for ranks that do not exist."""
    spec = RunSpec.model_validate(yaml.safe_load(tiny_spec()))
    planned = plan(spec, run_id="a-1", run_dir=str(tmp_path)).with_samples(64)
    files = RunDir(tmp_path).attempt(1)
    files.path.mkdir(parents=True)
    files.plan.write_text(planned.model_dump_json())
    with pytest.raises(RankMismatch, match="rank 1 finds a world of 4 processes, the plan has 2"):
        run(RunDir(tmp_path), ENVIRON, StopFlag(), TrainState(), [], [], Pulse())


@pytest.mark.parametrize("name", LAUNCH_VARIABLES)
def test_a_variable_that_is_not_set(name: str) -> None:
    RankInfo.from_environ(ENVIRON)
    for broken in ({**ENVIRON, name: ""}, {n: v for n, v in ENVIRON.items() if n != name}):
        with pytest.raises(RankMismatch, match=f"not set: {name}; the trainer is started by vitra"):
            RankInfo.from_environ(broken)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_RANK": "2"}, "local rank 2 of 2"),
        ({"RANK": "-1"}, "rank: "),
        ({"WORLD_SIZE": "many"}, "world_size: "),
        ({"MASTER_PORT": "65536"}, "master_port: "),
    ],
)
def test_variables_that_make_no_sense(changes: dict[str, str], says: str) -> None:
    with pytest.raises(RankMismatch, match=f"make no sense: .*{says}"):
        RankInfo.from_environ(ENVIRON | changes)
