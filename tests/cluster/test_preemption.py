"""One job in each partition that can be preempted, all preempted at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.cluster.handle import ClusterHandle
from tests.cluster.witness import lived_s, submit_witness


@dataclass(frozen=True)
class Jobs:
    cluster: ClusterHandle
    low: int
    scav: int
    nograce: int


@pytest.fixture(scope="module")
def jobs(module_cluster: ClusterHandle) -> Jobs:
    cluster = module_cluster
    partitions = ("low", "scav", "nograce")
    jobs = [submit_witness(cluster, f"--partition={name}") for name in partitions]
    preemptor = cluster.preempt(4)
    cluster.scancel(preemptor)
    low, scav, nograce = jobs
    for job in (low, nograce):
        cluster.wait_for_output(job, "life 1 rank up")
    cluster.wait_until_over(scav)
    return Jobs(cluster, low, scav, nograce)


def test_tasks_are_warned_and_have_the_grace_time(jobs: Jobs) -> None:
    output = jobs.cluster.output(jobs.low)
    assert "life first rank SIGTERM" in output
    assert "SIGUSR2" not in output
    assert lived_s(output, "rank") > 15


def test_without_grace_they_have_the_kill_wait(jobs: Jobs) -> None:
    output = jobs.cluster.output(jobs.nograce)
    assert "life first rank SIGTERM" in output
    assert lived_s(output, "rank") < 15


def test_the_batch_step_hears_of_it_after_the_ranks(jobs: Jobs) -> None:
    output = jobs.cluster.output(jobs.low)
    before, _, _ = output.partition("batch SIGTERM")
    assert before != output
    assert lived_s(before, "rank") > 15


def test_requeued_with_a_count(jobs: Jobs) -> None:
    for job in (jobs.low, jobs.nograce):
        assert jobs.cluster.restarts(job) == 1
        assert jobs.cluster.state(job) == "RUNNING"


def test_cancelled_for_good_where_the_partition_says_so(jobs: Jobs) -> None:
    assert jobs.cluster.state(jobs.scav) == "PREEMPTED"
    assert "life 1" not in jobs.cluster.output(jobs.scav)


def test_history_has_every_life_only_when_asked(jobs: Jobs) -> None:
    cluster = jobs.cluster
    cluster.wait_for(
        "the accounting",
        lambda: [row["State"] for row in cluster.sacct(jobs.low)] == ["PREEMPTED", "RUNNING"],
    )
    assert [row["State"] for row in cluster.sacct(jobs.low, lives=False)] == ["RUNNING"]
