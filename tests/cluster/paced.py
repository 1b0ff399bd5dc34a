"""Runs that a test holds, disturbs and compares with the run that nobody disturbed."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from slurm.cluster import NodeProcess
from tests.cluster.handle import SLURM_PATIENCE_S, ClusterHandle
from tests.cluster.runs import Run, SlurmVitra
from tests.conftest import Answer, VitraServer
from tests.e2e.runs import results, spec
from trainer.spec.rundir import read_lines, write_atomic

COMPONENTS = Path(__file__).parent / "components"
STEPS = 80
SAVE_INTERVAL = 10
#: Two micro-batches a step: a step takes a tenth of a second.
FORWARD_S = 0.05
#: Slower than anything a test waits for.
HELD_S = 1000.0
#: For `resources`: no other job on the same nodes, which would share what happens to them.
ALONE = {"additional_parameters": {"exclusive": True}}


class SharedServer(VitraServer):
    """The commands of tests that run side by side, one after the other."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._turn = threading.Lock()

    def run(self, words: Sequence[str], cwd: Path, environ: Mapping[str, str]) -> Answer:
        with self._turn:
            return super().run(words, cwd, environ)


class Paced(Run):
    """A run of `components/paced.py`, in a directory of its own in the cluster's `share`.

    Of 80 steps, 70 an epoch, saved every 10, with dropout; `world` processes.
    """

    def __init__(
        self,
        cluster: ClusterHandle,
        server: VitraServer,
        name: str,
        *,
        nodes: int = 2,
        tasks: int = 1,
        forward_s: float = FORWARD_S,
        environ: Mapping[str, str] | None = None,
        **changes: Any,
    ) -> None:
        """Submit it, with more variables; `changes` are to sections of the spec, by section."""
        vitra = SlurmVitra(cluster, server)
        vitra.directory = cluster.share / name
        vitra.directory.mkdir()
        code = vitra.directory / "code"
        code.mkdir()
        shutil.copy(COMPONENTS / "paced.py", code)
        path = os.pathsep.join(filter(None, [str(code), cluster.environ.get("PYTHONPATH")]))
        vitra.environ = {**cluster.environ, "PYTHONPATH": path, **(environ or {})}
        self._pace = {"forward": forward_s}
        self._pace_file = vitra.directory / "pace"
        self.pace()
        world = nodes * tasks
        document = spec(world)
        document["name"] = name
        document["model"]["kind"] = "paced:build_model"
        document["data"] |= {"kind": "paced:build_data", "options": {"samples": 280 * world}}
        document["train"]["max_steps"] = STEPS
        document["checkpoint"]["save_interval"] = SAVE_INTERVAL
        document["resources"] = {"nodes": nodes, "tasks_per_node": tasks, "time": 30}
        for section, keys in changes.items():
            document[section] = {**document.get(section, {}), **keys}
        spec_file = vitra.directory / "spec.yaml"
        spec_file.write_text(yaml.safe_dump(document, sort_keys=False))
        answer = vitra("submit", spec_file, "--json").json
        super().__init__(vitra, Path(answer["run_dir"]))
        self.job_id = int(answer["job_id"])

    @property
    def cluster(self) -> ClusterHandle:
        return self.vitra.cluster

    def pace(self, attempt: int | None = None, **seconds: float) -> None:
        """How long a forward pass and a save take from now on, at least: forward=, save=.

        In all attempts, or in that one, which counts for more.
        """
        where = "" if attempt is None else f" {attempt}"
        self._pace |= {f"{name}{where}": value for name, value in seconds.items()}
        write_atomic(self._pace_file, json.dumps(self._pace).encode())

    def trouble(self, what: str | None) -> None:
        """What rank 1 does from now on (see the component); None: nothing of the sort."""
        path = self.vitra.directory / "trouble"
        if what is None:
            path.unlink(missing_ok=True)
        else:
            write_atomic(path, what.encode())

    def resume(self, *words: str) -> None:
        """Go on with it, as a person does; a new job."""
        self.job_id = int(self.vitra("resume", self.id, "--json", *words).json["job_id"])

    # Where it is.

    def nodes(self) -> str:
        """The nodes that its job is on, in Slurm's notation."""
        return self.cluster.show(self.job_id)["NodeList"]

    def hosts(self) -> list[str]:
        """The nodes that its job is on."""
        return self.cluster.scontrol("show", "hostnames", self.nodes()).split()

    def processes(self, *words: str) -> list[NodeProcess]:
        """What it has running, with all these words in the command line."""
        return [
            process
            for process in self.cluster.processes()
            if self.id in " ".join(process.argv) and all(word in process.argv for word in words)
        ]

    def pid(self, word: str, *, rank: int | None = None) -> int:
        """Of the only process with this word in its command line, or that of this rank."""
        (found,) = [
            process.pid
            for process in self.processes(word)
            if rank is None or f"SLURM_PROCID={rank}" in _environ(process.pid)
        ]
        return found

    def batch_node(self) -> str:
        return self.cluster.show(self.job_id)["BatchHost"]

    def attempt(self) -> int:
        """The newest attempt; 0 before the first."""
        return max(self.dir.attempt_numbers(), default=0)

    def step(self, attempt: int | None = None) -> int:
        """The last step that the newest attempt, or that one, has logged; 0 if none."""
        records = list(read_lines(self.dir.attempt(attempt or self.attempt()).metrics))
        return int(records[-1]["step"]) if records else 0

    def wait_for_attempt(self, attempt: int, within_s: float = SLURM_PATIENCE_S) -> None:
        """Return once that attempt trains."""
        self._wait(lambda: self.step(attempt) > 0, f"attempt {attempt}", within_s)

    def wait_for_life(self, restarts: int) -> None:
        """Return once its job has been requeued so often."""
        self._wait(
            lambda: self.cluster.restarts(self.job_id) >= restarts,
            f"requeue {restarts}",
            SLURM_PATIENCE_S,
        )

    def wait_for_step(self, step: int, within_s: float = SLURM_PATIENCE_S) -> None:
        """Return once the newest attempt has logged that step."""
        self._wait(lambda: self.step() >= step, f"step {step}", within_s)

    def wait_for(self, event: str, count: int = 1, within_s: float = SLURM_PATIENCE_S) -> None:
        self._wait(lambda: len(self.events(event)) >= count, f"{count} x {event}", within_s)

    def wait_until_finished(self, within_s: float = SLURM_PATIENCE_S) -> str:
        """The state it has ended in, once it has left the queue."""
        self._wait(lambda: self.events("finished"), "the end", within_s)
        self._wait(lambda: not self.jobs(), "the end of its job", within_s)
        return self.state()

    def wait_until(self, true: Callable[[], object], what: str) -> None:
        self._wait(true, what, SLURM_PATIENCE_S)

    def _wait(self, true: Callable[[], object], what: str, within_s: float) -> None:
        try:
            self.cluster.wait_for(f"{what} of {self.id}", true, within_s)
        except AssertionError as err:
            raise AssertionError(f"{err}\n{self.account()}") from err

    # What came of it.

    def attempts(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.status()["attempts"]
        return found

    def verdicts(self) -> list[str | None]:
        return [attempt["verdict"] for attempt in self.attempts()]

    def lost_steps(self) -> list[int]:
        """How many finished steps each attempt but the last had to leave to its successor."""
        starts = {event["attempt"]: event["step"] for event in self.events("started")}
        lost: list[int] = []
        for attempt in self.attempts()[:-1]:
            number = attempt["attempt"]
            after = next(starts[later] for later in sorted(starts) if later > number)
            # One that trained nothing ends where it began, if it got that far.
            end = attempt["last_step"] or starts.get(number, after)
            lost.append(end - after)
        return lost

    def assert_equals(self, undisturbed: Mapping[str, Any], saved: Path | None = None) -> None:
        """It is complete, and nothing tells what it went through; `saved`: its checkpoints."""
        assert self.state() == "completed", self.account()
        found = results(self.dir.path, saved)
        assert [m["step"] for m in found["metrics"]] == list(range(1, STEPS + 1))
        assert found["step"] == STEPS
        for what, value in undisturbed.items():
            assert found[what] == value, f"{what} of {self.id} differs\n{self.account()}"

    def exit_codes(self, attempt: int) -> dict[int, int | None]:
        """Of the ranks that have ended: as their tasks have recorded it; None where by a signal."""
        paths = self.dir.attempt(attempt).path.glob("rank_*.exit")
        ends = [json.loads(path.read_text()) for path in paths]
        return {end["rank"]: end["exit_code"] for end in ends}

    def batch_log(self) -> str:
        """What its jobs have printed."""
        logs = sorted(self.dir.path.glob("batch-*.log"))
        return "".join(path.read_text(errors="replace") for path in logs)

    def account(self) -> str:
        """What happened to it, for a test that fails."""
        events = [
            " ".join(f"{name}={value}" for name, value in event.items())
            for event in read_lines(self.dir.events)
        ]
        notes = [
            f"{path.parent.name}: {record}"
            for path in sorted(self.dir.attempts.glob("*/supervisor.log"))
            for record in read_lines(path)
        ]
        return "\n".join([str(self.dir.path), *events, *notes, self.batch_log()[-3000:]])


class SideBySide:
    """Scenarios that run beside each other, as far as two processors allow, in the given order."""

    def __init__(self, at_once: int = 2) -> None:
        self._pool = ThreadPoolExecutor(at_once)
        self._futures: dict[str, Future[Any]] = {}

    def add(self, name: str, scenario: Callable[[], Any]) -> None:
        self._futures[name] = self._pool.submit(scenario)

    def __getitem__(self, name: str) -> Any:
        """What the scenario returned, once it has; raises what it raised."""
        return self._futures[name].result()

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def _environ(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")


def seconds_between(earlier: str, later: str) -> float:
    """Between two times of events."""
    return (datetime.fromisoformat(later) - datetime.fromisoformat(earlier)).total_seconds()
