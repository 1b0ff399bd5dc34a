"""Which job a run is: whoever starts first under the newest submission, and nobody else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.jobs import begin_submission, claim_run, current_job, known_jobs, note_job
from trainer.spec.rundir import RunDir, read_lines


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path)
    assert begin_submission(run_dir) == 1
    return run_dir


def events(run_dir: RunDir) -> list[dict[str, object]]:
    return list(read_lines(run_dir.events))


def test_the_first_to_start_has_the_run_in_all_its_lives(run_dir: RunDir) -> None:
    assert claim_run(run_dir, "17") is None
    assert claim_run(run_dir, "18") == "17"
    assert claim_run(run_dir, "17") is None
    # Whatever sbatch had said.
    note_job(run_dir, "18")
    assert current_job(run_dir, events(run_dir)) == "17"
    assert known_jobs(run_dir, events(run_dir)) == ["18", "17"]
    assert [path.name for path in run_dir.jobs.iterdir()] == ["1.json"]


def test_a_job_that_comes_back_after_it_was_given_up(run_dir: RunDir) -> None:
    assert claim_run(run_dir, "17") is None
    assert begin_submission(run_dir) == 2
    # The other has not started yet.
    assert claim_run(run_dir, "17") == "a newer job"
    assert claim_run(run_dir, "18") is None
    assert claim_run(run_dir, "17") == "18"
    assert claim_run(run_dir, "19") == "18"
    assert current_job(run_dir, events(run_dir)) == "18"


def test_one_that_never_started_under_the_older_submission_may_have_the_newer(
    run_dir: RunDir,
) -> None:
    note_job(run_dir, "17")
    begin_submission(run_dir)
    assert claim_run(run_dir, "17") is None
    assert claim_run(run_dir, "18") == "17"


def test_many_at_once(run_dir: RunDir) -> None:
    jobs = [str(number) for number in range(100, 116)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        answers = dict(zip(jobs, pool.map(lambda job: claim_run(run_dir, job), jobs), strict=True))
    (winner,) = [job for job, answer in answers.items() if answer is None]
    assert {answer for job, answer in answers.items() if job != winner} == {winner}
    assert [path.name for path in run_dir.jobs.iterdir()] == ["1.json"]
