"""How long what vitra does on Slurm takes, on the test cluster: `python -m tests.bench.slurm`.

As root, on a machine that does nothing else. Times are those of the run's own events. Two nodes
with two processes each, of a tiny model: what takes long is to start Python and torch four times on
this one machine, and Slurm's own pauses, which the table names. On two cores that start alone
takes several seconds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launcher.load import load_spec
from launcher.submit import probe
from slurm.settings import current_settings
from tests.cluster.handle import ClusterHandle, cluster_command
from tests.cluster.paced import ALONE, Paced, SharedServer, seconds_between


class Table:
    """Seconds, by what they are of."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    def add(self, what: str, seconds: float) -> None:
        self._taken.setdefault(what, []).append(seconds)

    def write(self) -> None:
        sys.stdout.write(f"{'seconds':56} {'median':>7} {'least':>7} {'most':>7}     n\n")
        for what, taken in self._taken.items():
            middle = statistics.median(taken)
            figures = f"{middle:7.2f} {min(taken):7.2f} {max(taken):7.2f} {len(taken):5}"
            sys.stdout.write(f"{what:56} {figures}\n")


def moment(run: Paced, event: str, attempt: int | None = None) -> str:
    """When the newest such event was, or the first of that attempt."""
    found = [e for e in run.events(event) if attempt in (None, e.get("attempt"))]
    return str((found[-1] if attempt is None else found[0])["at"])


def last_saved(run: Paced, attempt: int) -> str:
    """When the checkpoint that an attempt left behind was complete."""
    return str([e for e in run.events("saved") if e["attempt"] == attempt][-1]["at"])


def submit(cluster: ClusterHandle, server: SharedServer, table: Table, number: int) -> Paced:
    """From the command to the first step."""
    began = time.monotonic()
    run = Paced(cluster, server, f"submit-{number}", tasks=2, resources={"partition": "low"})
    table.add("vitra submit, whole, without the start of Python", time.monotonic() - began)
    asked, queued = moment(run, "submitting"), moment(run, "queued")
    table.add("  of that sbatch, until it has answered", seconds_between(asked, queued))
    run.wait_for_attempt(1)
    up = moment(run, "attempt", 1)
    table.add("job queued -> its supervisor starts the ranks", seconds_between(queued, up))
    training = moment(run, "started", 1)
    table.add("ranks started -> they train", seconds_between(up, training))
    table.add("job queued -> attempt 1 trains", seconds_between(queued, training))
    return run


def stop(run: Paced, table: Table) -> None:
    """By a signal to the batch step, as a warning before the time limit is."""
    run.wait_for_step(15)
    run.cluster.scancel("--signal=TERM", "--batch", run.job_id)
    run.wait_until(lambda: not run.jobs(), "the end of its job")
    began = time.monotonic()
    probe(load_spec(run.dir.spec, [], environ={}).spec, environ=run.vitra.environ)
    table.add("the probe of a submit alone, which imports torch", time.monotonic() - began)
    table.add("signal -> saved", seconds_between(moment(run, "signal"), last_saved(run, 1)))
    table.add("saved -> run over", seconds_between(last_saved(run, 1), moment(run, "finished")))


def preempt(run: Paced, table: Table, times: int) -> None:
    for attempt in range(1, times + 1):
        run.wait_for_attempt(attempt)
        run.wait_for_step(run.step() + 8)
        began = time.time()
        preemptor = run.cluster.preempt(2, nodes=[run.nodes()])
        table.add("preemptor submitted -> it runs", time.time() - began)
        run.cluster.scancel(preemptor)
        run.wait_for_attempt(attempt + 1)
        saved, requeued = last_saved(run, attempt), moment(run, "requeued")
        again, training = moment(run, "attempt"), moment(run, "started")
        before_s = seconds_between(_utc(began), saved)
        table.add("preemptor submitted -> preempted run has saved", before_s)
        table.add("saved -> requeued", seconds_between(saved, requeued))
        table.add(
            "requeued -> supervisor starts ranks (Slurm waits 5 s)",
            seconds_between(requeued, again),
        )
        table.add("requeued -> training again", seconds_between(requeued, training))
        table.add("preempted -> training again", seconds_between(_utc(began), training))


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f"{seconds % 1:.3f}"[1:] + "Z"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What takes how long on the test cluster.")
    parser.add_argument("--times", type=int, default=3, help="how often each is measured (3)")
    times = parser.parse_args(arguments).times
    cluster_command("start")
    cluster_command("clear")
    settings = current_settings()
    share = Path(tempfile.mkdtemp(prefix="bench-", dir=settings.state / "share"))
    share.chmod(0o777)
    cluster = ClusterHandle(settings, share)
    table = Table()
    with tempfile.TemporaryDirectory() as directory:
        server = SharedServer(Path(directory))
        try:
            for number in range(times):
                stop(submit(cluster, server, table, number), table)
            resources: dict[str, Any] = {"partition": "low", **ALONE}
            train = {"max_steps": 100_000}
            run = Paced(cluster, server, "preempted", tasks=2, resources=resources, train=train)
            preempt(run, table, times)
            cluster.scancel(run.job_id)
        finally:
            server.stop()
    cluster_command("clear")
    table.write()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
