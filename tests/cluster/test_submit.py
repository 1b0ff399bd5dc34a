"""`vitra submit` on a real cluster: what is asked for is what is run, once, or nothing is left."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.runs import SlurmVitra, in_place_of_sbatch
from tests.conftest import VitraServer, tiny_spec, tree, wait_until

CHECKOUT = Path(__file__).parents[2]
TIMED_OUT = (
    'echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2'
)


@pytest.fixture
def vitra(cluster: ClusterHandle, vitra_server: VitraServer) -> SlurmVitra:
    return SlurmVitra(cluster, vitra_server)


def test_submitted_once_and_it_finishes(cluster: ClusterHandle) -> None:
    """By a user other than root, within another job, from a directory with %; 2 x 2 processes."""
    home = cluster.share / "a %j b's täst"
    home.mkdir()
    home.chmod(0o777)
    (home / "spec.yaml").write_text(
        tiny_spec(resources={"nodes": 2, "tasks_per_node": 2, "time": "0:30:00"})
    )

    allocation = ["srun", "--quiet", "--time=5", "--mem=1000", "--ntasks=1"]

    def vitra(*words: str, within: Sequence[str] = ()) -> str:
        return cluster.run([*within, "vitra", *words], user=cluster.user, cwd=home).stdout

    planned = json.loads(vitra("submit", "spec.yaml", "--dry-run", "--json"))
    submitted = json.loads(vitra("submit", "spec.yaml", "--wait", "--json", within=allocation))
    status = json.loads(vitra("status", "tiny", "--json"))
    assert status["state"] == "completed"
    assert status["job_id"] == submitted["job_id"] == status["attempts"][0]["job_id"]
    assert status["step"] == status["last_checkpoint_step"] == 20
    run_dir = Path(submitted["run_dir"])
    assert {path.name for path in (run_dir / "attempts/1/logs").iterdir()} >= {
        f"rank_{rank}.log" for rank in range(4)
    }
    # What the dry run shows, what was sent, and what Slurm has: all the same.
    shown = planned["sbatch_script"].replace(planned["run_id"], submitted["run_id"])
    assert (run_dir / "submit.sbatch").read_text() == shown
    assert cluster.scontrol("write", "batch_script", submitted["job_id"], "-").rstrip("\0") == shown
    assert (run_dir / f"batch-{submitted['job_id']}.log").exists()
    assert cluster.show(int(submitted["job_id"]))["UserId"].startswith(cluster.user)
    # And further: where it ran before, in a new job.
    resumed = json.loads(vitra("resume", "tiny", "-o", "train.max_steps=25", "--wait", "--json"))
    assert int(resumed["job_id"]) > int(submitted["job_id"])
    status = json.loads(vitra("status", "tiny", "--json"))
    assert (status["state"], status["step"]) == ("completed", 25)
    assert status["attempts"][1]["first_step"] == 21


def test_the_code_and_the_limits_of_submit_count(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    """Submitted within an allocation, from a checkout that is broken before the job starts."""
    checkout = cluster.share / "checkout"
    for package in ("launcher", "trainer"):
        shutil.copytree(CHECKOUT / package, checkout / package)
    preemptor = cluster.preempt(4)
    leaks = {"SLURM_JOB_ID": "1", "SLURM_MEM_PER_NODE": "1", "SBATCH_TIMELIMIT": "1", "RANK": "7"}
    leaks |= {"SLURM_NTASKS": "9", "SLURM_PROCID": "3", "MASTER_PORT": "1", "WORLD_SIZE": "9"}
    process = vitra.start(
        *("submit", vitra.spec(resources__time=10, resources__setup=["env -0 >job.env"])),
        "--wait",
        environ={**leaks, "PYTHONPATH": str(checkout), "MINE": "a b"},
    )
    cluster.wait_for("the run", lambda: list(cluster.share.glob("runs/*/jobs*")) or vitra.run_ids())
    run = vitra.only_run()
    run.wait_for_event("queued")
    assert cluster.show(run.job)["TimeLimit"] == "00:10:00"
    for path in checkout.rglob("*.py"):
        path.write_text("raise SystemError('changed after submit')\n")
    cluster.scancel(preemptor)
    assert process.wait(timeout=120) == 0, vitra.terminal()
    variables = dict(
        text.split("=", 1) for text in (cluster.share / "job.env").read_text().split("\0") if text
    )
    assert variables["MINE"] == "a b"
    assert variables["SLURM_JOB_ID"] == str(run.job)
    assert not {"SBATCH_TIMELIMIT", "RANK", "MASTER_PORT", "WORLD_SIZE"} & variables.keys()
    assert "SLURM_PROCID" not in variables or variables["SLURM_PROCID"] == "0"
    assert variables.get("SLURM_NTASKS") == "2"
    terminal = vitra.terminal()
    assert "queued: job" in terminal
    assert "attempt 1: 2 ranks" in terminal
    assert "completed: all 2 ranks reached step 20" in terminal


LOST_ANSWERS = {
    "after the job was taken": f'"$real" "$@" >&2; {TIMED_OUT}; exit 1',
    "before it was": f'[ "$n" -gt 1 ] && exec "$real" "$@"; {TIMED_OUT}; exit 1',
    "with other words": '"$real" "$@" >&2; echo "sbatch: error: no idea" >&2; exit 1',
}


@pytest.mark.parametrize("script", LOST_ANSWERS.values(), ids=LOST_ANSWERS.keys())
def test_an_answer_that_is_lost(vitra: SlurmVitra, cluster: ClusterHandle, script: str) -> None:
    cluster.preempt(4)
    run = vitra.submit(environ=in_place_of_sbatch(cluster.share / "bin", script))
    (job,) = run.jobs()
    assert run.job == job.id
    assert run.state() == "queued"


def test_killed_while_the_job_is_taken(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    cluster.preempt(4)
    stuck = in_place_of_sbatch(cluster.share / "bin", '"$real" "$@" >&2; exec sleep 60')
    process = vitra.start("submit", vitra.spec(), environ=stuck)
    cluster.wait_for("the job", lambda: [j for j in cluster.queue() if j.name == "tiny"])
    process.kill()
    process.wait()
    run = vitra.only_run()
    assert run.events("queued") == []
    (job,) = run.jobs()
    assert run.job == job.id
    assert run.state() == "queued"
    (looked_at,) = vitra("watch", "--once", "--json").json["runs"]
    assert (looked_at["action"], looked_at["job_id"]) == ("alive", str(job.id))
    assert len(run.events("queued")) == 1
    assert len(run.jobs()) == 1


def test_refused_by_slurm(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    no = 'echo "sbatch: error: Batch job submission failed: Job violates policy" >&2; exit 1'
    refusing = in_place_of_sbatch(cluster.share / "bin", no)
    answer = vitra("submit", vitra.spec(), code=3, environ=refusing)
    assert "Job violates policy" in answer.stderr.splitlines()[-1]
    assert not (cluster.share / "runs").exists()

    # A run that was cancelled, and whose resume is refused, is as it was.
    cluster.preempt(4)
    run = vitra.submit()
    assert "has a job" in vitra("resume", run.id, code=2).stderr
    vitra("cancel", run.id)
    before = {name: content for name, (_, content) in tree(run.dir.path).items()}
    assert "mem_gb=501" in vitra("resume", run.id, "-o", "resources.mem_gb=501", code=3).stderr
    vitra("resume", run.id, "-o", "train.max_steps=9", code=3, environ=refusing)
    after = {name: content for name, (_, content) in tree(run.dir.path).items()}
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert changed <= {"events.jsonl", "supervisor.lock"}
    assert after["events.jsonl"].startswith(before["events.jsonl"])
    assert run.state() == "cancelled"
    assert vitra("watch", "--once", "--json").json["runs"] == []

    first = run.job
    vitra("resume", run.id, "-o", "train.max_steps=9")
    assert run.state() == "queued"
    assert run.job > first
    assert [job.id for job in run.jobs()] == [run.job]


def test_never_possible_and_not_asked_for(vitra: SlurmVitra, cluster: ClusterHandle) -> None:
    cluster.set_conf(
        "AccountingStorageEnforce=associations",
        "PartitionName=short Nodes=node[1-2] MaxTime=60 State=UP",
    )
    cluster.down("slurmctld")
    answer = vitra("submit", vitra.spec(), code=3)
    assert "Unable to contact slurm controller" in answer.stderr
    assert "Traceback" not in answer.stderr
    # Accounts are enforced only by a controller that was started so, and not for root.
    cluster.up("slurmctld")
    wait_until(lambda: "idle" in cluster.run(["sinfo", "-h", "-o", "%T"]).stdout, "the nodes")
    vitra.spec(resources__account="nosuch")
    refused = cluster.run(["vitra", "submit", "spec.yaml"], user=cluster.user, code=3)
    assert "resources.account=nosuch" in refused.stderr.splitlines()[-1]
    impossible: list[tuple[dict[str, Any], str, str]] = [
        ({"resources__partition": "nosuch"}, "partition=nosuch", "low"),
        ({"resources__partition": "short", "resources__time": "5:00:00"}, "5 h", "1 h"),
        ({"resources__nodes": 5, "train__global_batch_size": 40}, "nodes=5", "4 nodes"),
        ({"resources__gpus_per_node": "a100:2"}, "a100:2", "no a100"),
        ({"resources__constraint": "nosuch"}, "constraint=nosuch", "feature"),
    ]
    for changes, wish, limit in impossible:
        (line,) = vitra("submit", vitra.spec(**changes), code=3).stderr.splitlines()
        assert wish in line
        assert limit in line
    assert {path.name for path in cluster.share.iterdir()} == {"spec.yaml"}
    assert cluster.jobs() == []
