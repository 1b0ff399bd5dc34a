"""What can never start is refused with limit and wish; what is only unwise is said."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from launcher.feasible import check_feasible, measured_save_s, start_estimate
from launcher.planner import plan
from launcher.request import SubmitRequest, build_request
from tests.unit.fake_slurm import FakeSlurm
from trainer.spec.errors import SchedulerRejected, SchedulerUnavailable
from trainer.spec.run import RunSpec

NOW = datetime(2026, 12, 2, 4, 51, 0)
# As Slurm 22.05.8 prints it, shortened in the middle.
PARTITION = (
    "PartitionName={name} AllowGroups=ALL Default={default} QoS=N/A GraceTime={grace} "
    "MaxNodes={nodes} MaxTime={time} MinNodes=0 Nodes=node[1-4] PriorityTier=1 "
    "PreemptMode={preempt} State={state} TotalCPUs=256 TotalNodes={total} DefMemPerNode=UNLIMITED\n"
)
STARTS = (
    "sbatch: Job 8 to start at 2026-12-02T04:51:37 using 4 processors on nodes node[1-4] "
    "in partition low\n"
)


def partition(name: str, **facts: object) -> str:
    usual = {"default": "NO", "grace": 20, "nodes": "UNLIMITED", "time": "UNLIMITED"}
    more = {"preempt": "REQUEUE", "state": "UP", "total": 4}
    return PARTITION.format(name=name, **{**usual, **more, **facts})


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    """A cluster with a default partition `low`, and others with limits."""
    fake = FakeSlurm(tmp_path)
    partitions = [
        partition("low", default="YES"),
        partition("short", nodes=2, time="01:00:00", total=2),
        partition("shut", state="DOWN"),
        partition("high", preempt="OFF", grace=0),
    ]
    fake.play("scontrol", {"out": "".join(partitions)})
    fake.play("sinfo", {"out": "2|64|512000|gpu:a100:8(S:0-1)\n2|64|256000|gpu:8,shard:16\n"})
    fake.play("sbatch", {"err": STARTS})
    return fake


def request(**resources: object) -> SubmitRequest:
    spec = RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 20160, "max_steps": 10},
            "resources": resources,
        }
    )
    planned = plan(spec, run_id="a-DRYRUN", run_dir="/runs/a-DRYRUN")
    return build_request(planned, python="/usr/bin/python3")


def said(fake: FakeSlurm, save_s: float | None = None, **resources: object) -> list[str]:
    lines: list[str] = []
    check_feasible(request(**resources), fake.slurm(), say=lines.append, save_s=save_s, now=NOW)
    return lines


IMPOSSIBLE = {
    "unknown partition": ({"partition": "nosuch"}, "partition=nosuch", "high, low, short, shut"),
    "one of two is unknown": ({"partition": "low,nosuch"}, "partition=nosuch", "low"),
    "time": ({"partition": "short", "time": "1:30:00"}, "1 h 30 min", "allows 1 h"),
    "nodes": ({"nodes": 5}, "resources.nodes=5", "low has 4 nodes"),
    "nodes of a partition": (
        {"nodes": 3, "partition": "short", "time": 60},
        "nodes=3",
        "has 2 nodes",
    ),
    "elastic": ({"nodes": {"min": 5, "max": 9}}, "resources.nodes=5", "has 4 nodes"),
    "gpus": ({"gpus_per_node": 9}, "gpus_per_node=9", "have 8 GPUs"),
    "gpu type": ({"gpus_per_node": "h100:1"}, "gpus_per_node=h100:1", "no h100 GPUs"),
    "gres": ({"gpus_per_node": 9, "gpu_request": "gres"}, "gpus_per_node=9", "have 8 GPUs"),
    "typed nodes": ({"gpus_per_node": "a100:8", "nodes": 3}, "nodes=3", "only 2 nodes"),
    "cpus": ({"tasks_per_node": 5, "cpus_per_task": 16}, "= 80 CPUs", "have 64"),
    "memory": ({"mem_gb": 501}, "mem_gb=501", "have 500"),
    "memory of so many": ({"mem_gb": 300, "nodes": 3}, "nodes=3", "only 2 nodes"),
    "down": ({"partition": "shut"}, "partition=shut", "DOWN"),
}


@pytest.mark.parametrize(("resources", "wish", "limit"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible(fake: FakeSlurm, resources: dict[str, object], wish: str, limit: str) -> None:
    with pytest.raises(SchedulerRejected) as refused:
        said(fake, **resources)
    (line,) = str(refused.value).splitlines()
    assert wish in line
    assert limit in line
    assert fake.calls("sbatch") == []


def test_all_that_is_wrong_at_once(fake: FakeSlurm) -> None:
    with pytest.raises(SchedulerRejected) as refused:
        said(fake, partition="short", nodes=3, mem_gb=999, time="3:00:00")
    assert len(str(refused.value).splitlines()) == 3


POSSIBLE = {
    "nothing asked": {},
    "everything": {"nodes": 4, "gpus_per_node": 8, "mem_gb": 250, "cpus_per_task": 8},
    "whole memory": {"mem_gb": 0},
    "type in other letters": {"gpus_per_node": "A100:8", "nodes": 2},
    "one of two partitions": {"partition": "short,low", "nodes": 4},
    "gpus not asked for in a way that Slurm knows": {"gpus_per_node": 9, "gpu_request": "none"},
}


@pytest.mark.parametrize("resources", POSSIBLE.values(), ids=POSSIBLE.keys())
def test_possible(fake: FakeSlurm, resources: dict[str, object]) -> None:
    assert said(fake, **resources) == ["Slurm: could start at once, on node[1-4]"]
    (call,) = fake.calls("sbatch")
    assert call.argv == ["--test-only"]
    assert "#SBATCH --job-name=a" in call.stdin


REFUSED = {
    "account": (
        {"account": "nosuch"},
        "allocation failure: Invalid account or account/partition combination specified",
        "resources.account=nosuch",
    ),
    "no account": (
        {},
        "allocation failure: Invalid account or account/partition combination specified",
        "resources.account:",
    ),
    "qos": ({"qos": "x"}, "allocation failure: Invalid qos specification", "resources.qos=x"),
    "feature": (
        {"constraint": "foo"},
        "allocation failure: Invalid feature specification",
        "resources.constraint=foo",
    ),
    "a way of asking for GPUs that this cluster does not know": (
        {"gpus_per_node": 2},
        "allocation failure: Invalid generic resource (gres) specification",
        "resources.gpu_request",
    ),
    "option": (
        {},
        "sbatch: unrecognized option '--foo=bar'\nTry \"sbatch --help\" for more information",
        "unrecognized option '--foo=bar'",
    ),
}


@pytest.mark.parametrize(("resources", "answer", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_only_slurm_knows(
    fake: FakeSlurm, resources: dict[str, object], answer: str, named: str
) -> None:
    fake.play("sbatch", {"rc": 1, "err": answer + "\n"})
    fake.play("sinfo", {"out": "4|64|512000|gpu:8\n"}, {"out": "node1|idle\nnode2|mixed\n"})
    with pytest.raises(SchedulerRejected) as refused:
        said(fake, **resources)
    assert named in str(refused.value)


@pytest.mark.parametrize(("state", "refused"), [("down*", False), ("idle", True)])
def test_nodes_out_of_service(fake: FakeSlurm, state: str, refused: bool) -> None:
    """The same words mean "never" on a healthy partition, and "not now" on another."""
    fake.play(
        "sbatch",
        {"rc": 1, "err": "allocation failure: Requested node configuration is not available\n"},
    )
    fake.play("sinfo", {"out": "4|64|512000|gpu:8\n"}, {"out": f"node1|idle\nnode2|{state}\n"})
    if refused:
        with pytest.raises(SchedulerRejected, match="not available"):
            said(fake)
    else:
        (line,) = said(fake)
        assert line.startswith("warning: ")


def test_slurm_out_of_reach(fake: FakeSlurm) -> None:
    gone = "slurm_load_partitions: Unable to contact slurm controller (connect failure)\n"
    fake.play("scontrol", {"rc": 1, "err": gone})
    with pytest.raises(SchedulerUnavailable, match="Unable to contact"):
        said(fake)


def test_no_slurm_here(fake: FakeSlurm) -> None:
    (fake.directory / "scontrol").unlink()
    with pytest.raises(SchedulerUnavailable) as missing:
        check_feasible(
            request(), fake.slurm(PATH=str(fake.directory)), say=lambda _text: None, now=NOW
        )
    assert "--local" in str(missing.value)
    assert "--dry-run" in str(missing.value)


def test_a_grace_time_shorter_than_saving(fake: FakeSlurm) -> None:
    assert any("gives 20 s" in line for line in said(fake, save_s=33.4))
    assert not any("warning" in line for line in said(fake, save_s=3.0))
    assert not any("warning" in line for line in said(fake, save_s=33.4, partition="high"))


def test_how_long_saving_took() -> None:
    def event(name: str, at: str, attempt: int) -> dict[str, object]:
        return {"event": name, "at": f"2026-12-02T05:{at}Z", "attempt": attempt}

    events = [
        event("saved", "00:00.000", 1),
        event("signal", "00:10.000", 1),
        event("saved", "00:22.500", 1),
        event("signal", "01:00.000", 2),
        event("saved", "09:00.000", 3),
    ]
    assert measured_save_s(events) == 12.5
    assert measured_save_s(events[:2]) is None


def test_start_estimate() -> None:
    late = "sbatch: Job 8 to start at 2026-12-02T07:01:00 using 4 processors on nodes n[1-4] in\n"
    assert start_estimate(late, NOW) == "may start at 2026-12-02 07:01, in 2 h 10 min, on n[1-4]"
    assert start_estimate("", NOW) is None
