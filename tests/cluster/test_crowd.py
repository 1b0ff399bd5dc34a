"""Many runs on one node at once, and more jobs than runs."""

from __future__ import annotations

from functools import partial

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.paced import Paced, SharedServer, SideBySide

pytestmark = pytest.mark.timeout(600)

N_RUNS = 8


def test_eight_runs_on_one_node_and_two_jobs_too_many(
    cluster: ClusterHandle, shared_server: SharedServer
) -> None:
    """All runs' ranks meet at ports of the same host; each run is trained by one job."""
    blocker = cluster.preempt(1, nodes=["node1"])
    start = partial(
        Paced,
        cluster,
        shared_server,
        nodes=1,
        forward_s=0.0,
        train={"max_steps": 3},
        resources={"nodelist": "node1"},
    )
    with SideBySide() as scenarios:
        names = [f"crowd-{number}" for number in range(N_RUNS)]
        for name in names:
            scenarios.add(name, partial(start, name))
        runs: list[Paced] = [scenarios[name] for name in names]
    crowded = runs[0]
    jobs = [crowded.job_id, submit_again(crowded), submit_again(crowded)]
    cluster.scancel(blocker)
    for run in runs:
        assert run.wait_until_finished() == "completed", run.account()
        assert run.verdicts() == ["completed"]
    for job in jobs:
        cluster.wait_until_over(job)
    (trained_by,) = [attempt["job_id"] for attempt in crowded.attempts()]
    codes = {str(job): cluster.show(job)["ExitCode"] for job in jobs}
    assert codes.pop(trained_by) == "0:0"
    assert list(codes.values()) == ["93:0", "93:0"]
    assert crowded.batch_log().count(f"the run belongs to job {trained_by}") == 2


def submit_again(run: Paced) -> int:
    """Make another job of the run's script, as a person might, or an sbatch that times out."""
    words = ["sbatch", "--parsable", run.dir.script]
    answer = run.cluster.run(words, cwd=run.vitra.directory, environ=run.vitra.environ)
    return int(answer.stdout)
