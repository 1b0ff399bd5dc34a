"""A port taken between its choice and its use costs an attempt, not the run."""

from __future__ import annotations

import socket

import pytest
import torch.distributed as dist

from launcher.judge import Finding, PastAttempt, decide, judge
from trainer.spec.outcome import RankExit, RankReport, Verdict
from trainer.spec.run import RetrySpec


def finding_on_a_taken_port() -> Finding:
    """What the supervisor finds after a rank has really met a taken port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(dist.DistNetworkError) as met:
            dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True)
    report = RankReport(
        rank=0,
        exit_code=1,
        error=type(met.value).__name__,
        message=str(met.value).splitlines()[0],
        last_step=0,
    )
    end = RankExit(rank=0, node="here", exit_code=1, ended_at=1.0)
    return judge({0: end}, {0: report}, total_steps=5, stop_asked=False)


def test_it_starts_again_without_a_budget_for_errors() -> None:
    finding = finding_on_a_taken_port()
    assert finding.verdict is Verdict.ERROR
    policy = RetrySpec()
    assert "error" not in policy.restart_on
    decision = decide(finding, [PastAttempt(Verdict.ERROR, made_progress=False)], policy)
    assert decision.restart


def test_it_does_not_start_again_for_ever() -> None:
    past = [PastAttempt(Verdict.ERROR, made_progress=False)] * 3
    decision = decide(finding_on_a_taken_port(), past, RetrySpec())
    assert not decision.restart
    assert decision.verdict is Verdict.NO_PROGRESS
