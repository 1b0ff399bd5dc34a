"""What Slurm 22.05.8 prints, as recorded on a cluster, and what is made of it."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pytest

from launcher.slurm import refusal
from launcher.slurm_answers import Partition, fields, limit
from tests.unit.fake_slurm import FakeSlurm
from trainer.spec.errors import SchedulerError, SchedulerRejected, SchedulerUnavailable

JOB = (
    "JobId=59 JobName=a b Requeue=0 UserId=root(0) GroupId=root(0) MCS_label=N/A Priority=1 Nice=0 "
    "Account=root QOS=normal JobState=RUNNING Reason=None Dependency=(null) Requeue=1 Restarts=2 "
    "BatchFlag=1 Reboot=0 ExitCode=0:0 RunTime=00:11:30 TimeLimit=00:30:00 TimeMin=N/A "
    "SubmitTime=2026-12-02T06:39:53 EligibleTime=2026-12-02T06:39:53 "
    "AccrueTime=2026-12-02T06:39:53 StartTime=2026-12-02T06:39:54 EndTime=2026-12-02T07:09:53 "
    "Deadline=N/A PreemptEligibleTime=2026-12-02T06:39:53 PreemptTime=None SuspendTime=None "
    "SecsPreSuspend=0 LastSchedEval=2026-12-02T06:39:53 Scheduler=Backfill Partition=low "
    "AllocNode:Sid=localhost:9147 ReqNodeList=(null) ExcNodeList=(null) NodeList=node[1-2] "
    "BatchHost=node1 NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:* "
    "TRES=cpu=2,mem=512M,node=2,billing=2 Socks/Node=* NtasksPerN:B:S:C=1:0:*:* CoreSpec=* "
    "MinCPUsNode=1 MinMemoryCPU=256M MinTmpDiskNode=0 Features=(null) DelayBoot=00:00:00 "
    "OverSubscribe=OK Contiguous=0 Licenses=(null) Network=(null) Command=/share/a b/submit.sbatch "
    "WorkDir=/share/a b Comment=vitra:a-20261202-063946-kvgw  StdErr=/share/a b/batch-59.log "
    "StdIn=/dev/null StdOut=/share/a b/batch-59.log Power= \n"
)
HISTORY = (
    "37|PREEMPTED|0:0|2026-12-02T05:57:25|2026-12-02T05:57:55|node[3-4]|a|b\n"
    "37|CANCELLED by 1001|0:15|2026-12-02T05:57:57|2026-12-02T05:58:55|node[3-4]|a|b\n"
    "37|PENDING|0:0|2026-12-02T05:58:57|Unknown|None assigned|a|b\n"
)


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path)


def test_a_job(fake: FakeSlurm) -> None:
    fake.play("scontrol", {"out": JOB})
    job = fake.slurm().job("59")
    assert job is not None
    assert (job.job_id, job.state, job.reason, job.restarts) == ("59", "RUNNING", None, 2)
    assert job.comment == "vitra:a-20261202-063946-kvgw"
    assert job.end_time == datetime(2026, 12, 2, 7, 9, 53)
    assert job.start_time == datetime(2026, 12, 2, 6, 39, 54)
    assert job.preempt_time is None
    assert job.nodes == "node[1-2]"
    assert fake.calls("scontrol")[0].argv == ["-o", "show", "job", "59"]
    # What a user has named something is nothing that Slurm says.
    assert fields(JOB)["JobName"] == "a b"


def test_a_job_that_is_preempted_with_a_grace_time(fake: FakeSlurm) -> None:
    preempted = JOB.replace("PreemptTime=None", "PreemptTime=2026-12-02T06:50:00")
    fake.play("scontrol", {"out": preempted})
    job = fake.slurm().job("59")
    assert job is not None
    assert job.preempt_time == datetime(2026, 12, 2, 6, 50)


def test_a_job_that_is_forgotten(fake: FakeSlurm) -> None:
    fake.play("scontrol", {"rc": 1, "err": "slurm_load_jobs error: Invalid job id specified\n"})
    assert fake.slurm().job("59") is None


def test_no_answer_is_no_answer_however_often(fake: FakeSlurm) -> None:
    fake.play("scontrol", {}, {}, {"out": JOB})
    assert fake.slurm().job("59") is not None
    fake.play("scontrol", {})
    with pytest.raises(SchedulerUnavailable, match="answered with nothing"):
        fake.slurm().job("59")


def test_the_lives_of_a_job(fake: FakeSlurm) -> None:
    fake.play("sacct", {"out": HISTORY})
    first, second, third = fake.slurm().history("37")
    assert (first.state, first.by, first.name) == ("PREEMPTED", None, "a|b")
    assert (second.state, second.by, second.exit_code) == ("CANCELLED", "1001", "0:15")
    assert (third.state, third.submitted_at) == ("PENDING", "2026-12-02T05:58:57")


def test_steps_and_nodes(fake: FakeSlurm) -> None:
    slurm = fake.slurm()
    fake.play("squeue", {"out": "59.0\n59.1\n59.batch\n59.extern\n"})
    assert slurm.steps("59") == ["59.0", "59.1"]
    fake.play(
        "sinfo", {"out": "node1|mixed\nnode1|mixed\nnode2|down*\nnode3|idle*\nnode4|drained\n"}
    )
    assert slurm.unusable(["node1", "node2", "node3", "node4"]) == ["node2", "node3"]
    fake.play("scontrol", {"out": "AccountingStorageHost  = x\nSlurmdTimeout  = 20 sec\n"})
    assert slurm.slurmd_timeout_s() == 20


def test_a_list_of_nodes_that_is_none(fake: FakeSlurm) -> None:
    # What scontrol prints for gpu[001, and for n[3-1].
    for said in ({"out": "gpu]\n"}, {"err": "Invalid hostlist: n[3-1]\n"}):
        fake.play("scontrol", said)
        with pytest.raises(SchedulerError):
            fake.slurm().host_names("gpu[001")


def test_whether_nodes_live(fake: FakeSlurm) -> None:
    slurm = fake.slurm(SLURM_JOB_ID="1", SLURM_MEM_PER_NODE="1")
    assert slurm.nodes_answer("59", ["node1", "node2"])
    (call,) = fake.calls("srun")
    assert {"--jobid=59", "--nodelist=node1,node2", "--overlap", "true"} <= set(call.argv)
    assert [name for name in call.environ if name.startswith("SLURM_")] == ["SLURM_CONF"]
    fake.play("srun", {"rc": 1, "err": "srun: error: Unable to create step\n"})
    assert not slurm.nodes_answer("59", ["node1"])


def test_a_partition(fake: FakeSlurm) -> None:
    said = (
        "PartitionName=low AllowGroups=ALL Default=YES GraceTime=20 Hidden=NO MaxNodes=2 "
        "MaxTime=1-02:00:00 MinNodes=0 Nodes=node[1-4] PriorityTier=1 PreemptMode=REQUEUE "
        "State=UP TotalCPUs=256 TotalNodes=4\n"
    )
    fake.play("scontrol", {"out": said})
    assert fake.slurm().partitions() == {
        "low": Partition("low", "UP", timedelta(hours=26), 2, 4, 20, "REQUEUE", "node[1-4]")
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("00:30:00", timedelta(minutes=30)),
        ("1-02:03:04", timedelta(days=1, hours=2, minutes=3, seconds=4)),
        ("2-12", timedelta(days=2, hours=12)),
        ("30:15", timedelta(minutes=30, seconds=15)),
        ("UNLIMITED", None),
        ("infinite", None),
        ("", None),
    ],
)
def test_limits(text: str, expected: timedelta | None) -> None:
    assert limit(text) == expected


def test_whose_fault_it_is() -> None:
    away = refusal(
        "squeue", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)\n"
    )
    assert isinstance(away, SchedulerUnavailable)
    no = refusal("sbatch", "sbatch: error: invalid partition specified: x\nsbatch: error: sorry\n")
    assert isinstance(no, SchedulerRejected)
    assert no.message == "sbatch: invalid partition specified: x; sorry"
