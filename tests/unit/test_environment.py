"""What reaches a rank: what vitra sets, what the spec sets, and nothing left over in the shell."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from launcher import shell
from launcher.environment import component_environment, rank_environment, without_stale
from launcher.planner import plan
from launcher.schedulers.ports import free_port
from trainer.spec.plan import Plan
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir

RUN_DIR = RunDir(Path("/runs/a-20260101-000000-abcd"))


def plan_of(**resources: object) -> Plan:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 8, "max_steps": 10},
            "resources": resources,
        }
    )
    return plan(spec, run_id=RUN_DIR.path.name, run_dir=str(RUN_DIR.path))


def test_stale_variables_are_dropped() -> None:
    stale = dict.fromkeys(LAUNCH_VARIABLES, "stale") | {
        "SLURM_PROCID": "3",
        "SLURM_JOB_ID": "1",
        "SBATCH_PARTITION": "x",
        "SRUN_CPUS_PER_TASK": "2",
        "TORCHELASTIC_RUN_ID": "x",
        "PMI_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "1",
        "VITRA_PARENT_PID": "1",
        "VITRA_PULSE": "127.0.0.1 1 00",
    }
    kept = {"PATH": "/bin", "HOME": "/root", "RANKING": "x", "NCCL_DEBUG": "INFO"}
    assert without_stale(stale | kept) == kept


def test_rank_environment() -> None:
    found = rank_environment(
        {"HOME": "/home/a", "RANK": "3", "OMP_NUM_THREADS": "64", "MKL_CBWR": "COMPATIBLE"},
        plan_of(cpus_per_task=4),
        RUN_DIR,
        7,
    )
    assert found["HOME"] == "/home/a"
    assert "RANK" not in found
    # Fixed for the life of a run: results depend on them.
    assert found["OMP_NUM_THREADS"] == found["MKL_NUM_THREADS"] == "4"
    assert found["MKL_CBWR"] == "AUTO"
    assert found["VITRA_RUN_ID"] == RUN_DIR.path.name
    assert found["VITRA_RUN_DIR"] == str(RUN_DIR.path)
    assert found["VITRA_ATTEMPT"] == "7"


def test_the_spec_s_own_variables_come_last() -> None:
    planned = plan_of(env={"NCCL_DEBUG": "WARN", "HF_HOME": None, "OMP_NUM_THREADS": "2"})
    shell_has = {"NCCL_DEBUG": "INFO", "HF_HOME": "/models", "SLURM_JOB_ID": "1"}
    found = rank_environment(shell_has, planned, RUN_DIR, 1)
    assert found["NCCL_DEBUG"] == "WARN"
    assert found["HF_HOME"] == "/models", "null passes the submitter's value through"
    assert found["OMP_NUM_THREADS"] == "2"
    assert component_environment(shell_has, planned.spec) == {
        "NCCL_DEBUG": "WARN",
        "HF_HOME": "/models",
        "OMP_NUM_THREADS": "2",
    }


def test_an_unset_variable_to_pass_through_stays_unset() -> None:
    assert "HF_HOME" not in rank_environment({}, plan_of(env={"HF_HOME": None}), RUN_DIR, 1)


def test_free_port_is_one_that_nothing_listens_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where only another interface's is taken: the ranks' rendezvous takes all."""
    with socket.socket() as taken, socket.socket() as free:
        taken.bind(("127.0.0.2", 0))
        taken.listen()
        free.bind(("127.0.0.1", 0))
        candidates = [taken.getsockname()[1], free.getsockname()[1]]
        free.close()
        monkeypatch.setattr("random.Random.sample", lambda *_: candidates)
        assert free_port() == candidates[1]


def test_program_that_gives_no_answer() -> None:
    with pytest.raises(shell.CommandTimedOut, match=r"sleep gave no answer within 0\.1 s"):
        shell.run(["sleep", "30"], timeout_s=0.1)


def test_program_that_answers() -> None:
    answer = shell.run(["sh", "-c", "cat; echo oh >&2; exit 3"], timeout_s=10, stdin=b"hello")
    assert (answer.returncode, answer.stdout, answer.stderr) == (3, b"hello", "oh\n")
