"""Runs on the cluster, as their users and the tests see them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.jobs import job_comment
from tests.cluster.handle import ClusterHandle, Queued
from tests.conftest import Vitra, VitraServer, tiny_spec
from trainer.spec.rundir import RunDir, read_lines

#: One process on one node, which trains for some seconds.
SMALL: dict[str, object] = {
    "train__max_steps": 20,
    "resources__tasks_per_node": 1,
    "resources__time": 10,
}


class SlurmVitra(Vitra):
    """`vitra` as root has it on the cluster's host, in the test's directory on all nodes."""

    def __init__(self, cluster: ClusterHandle, server: VitraServer) -> None:
        super().__init__(cluster.share, server, cluster.environ)
        self.cluster = cluster

    def submit(self, *words: str, environ: Mapping[str, str] | None = None, **spec: object) -> Run:
        """Submit a small run, with changes to its spec; returns once it has a job."""
        path = self.directory / "spec.yaml"
        path.write_text(tiny_spec(**{**SMALL, **spec}))
        answer = self("submit", path, "--json", *words, environ=environ).json
        return Run(self, Path(answer["run_dir"]))

    def only_run(self) -> Run:
        """The one run there is, whatever has become of its submission."""
        (record,) = (self.directory / "runs").glob("*/run.json")
        return Run(self, record.parent)

    def run_ids(self) -> list[str]:
        return sorted(path.parent.name for path in (self.directory / "runs").glob("*/run.json"))


class Run:
    """A submitted run."""

    def __init__(self, vitra: SlurmVitra, path: Path) -> None:
        self.vitra = vitra
        self.dir = RunDir(path)
        self.id = path.name

    @property
    def job(self) -> int:
        """The job that the run is, or was, by `vitra status`."""
        return int(self.status()["job_id"])

    def status(self, **environ: str) -> dict[str, Any]:
        return self.vitra("status", self.id, "--json", environ=environ).json

    def state(self) -> str:
        return str(self.status()["state"])

    def jobs(self, *options: str) -> list[Queued]:
        """Its jobs in the queue, or those that squeue shows with these options."""
        queue = self.vitra.cluster.queue(*options)
        return [job for job in queue if job.comment == job_comment(self.id)]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.dir.events) if event["event"] == name]

    def wait_for_state(self, *states: str) -> None:
        self.vitra.cluster.wait_for(f"{self.id} to be {states}", lambda: self.state() in states)

    def wait_for_event(self, name: str, count: int = 1) -> None:
        self.vitra.cluster.wait_for(
            f"{count} x {name} of {self.id}", lambda: len(self.events(name)) >= count
        )


def in_place_of_sbatch(directory: Path, script: str) -> dict[str, str]:
    """A PATH on which `sbatch` is a bash script, but `sbatch --test-only` is the real one.

    In it, $real is the real one's path and $n the number of the call, from 1.
    """
    return _in_place_of(
        directory,
        "sbatch",
        f"""\
[ "$1" != --test-only ] || exec "$real" "$@"
echo call >>"${{0%/*}}/calls"
n=$(wc -l <"${{0%/*}}/calls")
{script}
""",
    )


def where_requeue_is_refused(directory: Path) -> dict[str, str]:
    """A PATH on which `scontrol requeue` is refused, whatever the job's owner has allowed."""
    return _in_place_of(
        directory,
        "scontrol",
        """\
[ "$1" = requeue ] || exec "$real" "$@"
echo "Requested operation is presently disabled for job $2" >&2
exit 1
""",
    )


def _in_place_of(directory: Path, name: str, script: str) -> dict[str, str]:
    directory.mkdir()
    command = directory / name
    command.write_text(f"#!/bin/bash\nreal={shutil.which(name)}\n{script}")
    command.chmod(0o755)
    return {"PATH": f"{directory}:{os.environ['PATH']}"}
