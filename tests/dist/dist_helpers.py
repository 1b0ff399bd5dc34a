"""Real processes for the tests of the trainer: gloo worlds, and the ranks of a run.

Every process is forked from one server that has torch loaded already, so that a world of four is
there within a second. Apart from that a rank of a run is what the launcher starts: its own process
and environment, the trainer's own `main`, and its own exit code or signal at the end.
"""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from launcher.environment import rank_environment
from launcher.planner import plan
from launcher.schedulers.ports import free_port
from trainer.checkpoint.codec import (
    index_file,
    load_tensors,
    parse_index,
    tensor_shapes,
)
from trainer.data.order import SampleOrder
from trainer.spec.outcome import RankReport
from trainer.spec.plan import Plan
from trainer.spec.ranks import RankInfo
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir, read_lines
from trainer.spec.snapshot import Snapshot
from trainer.store.checkpoints import CheckpointStore
from trainer.store.manifest import MANIFEST_NAME, CheckpointManifest
from trainer.store.storage import LocalStorage, open_storage

#: Far beyond what any of these takes: a world that hangs fails its test, and is killed.
_PATIENCE_S = 90.0
#: What has to be set before torch is loaded, as the launcher does.
_FIXED = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MKL_CBWR": "AUTO"}
#: The last two are loaded late by numpy and torch, which would take each rank half a second.
_PRELOADED = [
    "dist_helpers",
    "pytest",
    "trainer.__main__",
    "trainer.worker",
    "trainer.data.synthetic",
    "trainer.models.vla",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "numpy.ma",
    "torch._inductor.config",
]

SPEC: dict[str, Any] = {
    "name": "core",
    "seed": 11,
    "model": {
        "kind": "vla",
        "options": {
            "dim": 16,
            "layers": 1,
            "heads": 2,
            "action_width": 16,
            "action_layers": 1,
            "action_heads": 2,
            "vocabulary": 32,
            "max_words": 4,
        },
    },
    "data": {"kind": "synthetic", "options": {"samples": 40}, "num_workers": 0},
    "train": {
        "max_steps": 6,
        "global_batch_size": 16,
        "per_device_batch_size": 2,
        "learning_rate": 3e-3,
        "repeated_diffusion_steps": 2,
        "enable_mixed_precision_training": False,
        "enable_gradient_checkpointing": False,
    },
    "checkpoint": {"save_interval": 100, "keep_last": 50},
    "tracking": {"sample_ids": True},
}


def spec(world: int, *changes: dict[str, Any]) -> RunSpec:
    """SPEC with a world size and some keys of its sections changed."""
    document = {**SPEC, "resources": {"tasks_per_node": world}}
    for change in changes:
        for section, keys in change.items():
            document[section] = {**document[section], **keys}
    return RunSpec.model_validate(document)


def planned(world: int, *changes: dict[str, Any], run_dir: str = "/nowhere") -> Plan:
    """The plan of such a spec, for use without a run."""
    return plan(spec(world, *changes), run_id="core-1", run_dir=run_dir).with_samples(40)


def spoiled(how: str, step: int, rank: int, world: int) -> dict[str, Any]:
    """A change of `spec`: data of which `rank` meets a spoiled sample in `step` for the first time."""
    position = (step - 1) * 16 + rank * (16 // world) + 3
    _, index = SampleOrder(200, 11).at(np.array([position], dtype=np.int64))
    options = {"samples": 200, "bad": int(index[0]), "how": how}
    return {"data": {"kind": "dist_components:spoiled", "options": options}}


def lone_rank(attempt: int = 1) -> RankInfo:
    """The one rank of a world of one."""
    return RankInfo(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        master_addr="127.0.0.1",
        master_port=1,
        run_id="core-1",
        attempt=attempt,
    )


# -- Worlds ------------------------------------------------------------------------------------


def on_ranks(world: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `body(rank, *arguments)` in each process of a gloo world; the results by rank.

    `body` is a function of a module. A world of one has no process group, as in a run.

    Raises:
        AssertionError: a process raised (its traceback is the message), died or hung.
    """
    port = free_port()
    pipes: list[Connection] = []
    processes: list[BaseProcess] = []
    for rank in range(world):
        ours, theirs = _server().Pipe(duplex=False)
        process = _server().Process(
            target=_in_world, args=(rank, world, port, theirs, body, arguments), daemon=True
        )
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        return _answers(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    answers: dict[int, Any] = {}
    deadline = time.monotonic() + _PATIENCE_S
    while len(answers) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
        ready = wait(open_pipes, timeout=max(0.0, deadline - time.monotonic()))
        assert ready, f"only ranks {sorted(answers)} of {len(pipes)} answered"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                good, answers[rank] = pickle.loads(pipes[rank].recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert good, f"rank {rank}:\n{answers[rank]}"
    return [answers[rank] for rank in range(len(pipes))]


def _in_world(
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    body: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    try:
        if world > 1:
            dist.init_process_group(
                "gloo",
                init_method=f"tcp://127.0.0.1:{port}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=_PATIENCE_S),
            )
        answer = (True, body(rank, *arguments))
        if world > 1:
            dist.barrier()
    except BaseException:  # noqa: BLE001 - whatever it was, the test is told
        answer = (False, traceback.format_exc())
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    os._exit(0)


# -- Runs --------------------------------------------------------------------------------------


class Checkpoint(NamedTuple):
    """All that one checkpoint holds, put together again."""

    manifest: CheckpointManifest
    tensors: dict[str, Tensor]
    state: dict[str, Any]


class Run:
    """A run directory as submit leaves it. `changes` are those of `spec`."""

    def __init__(self, root: Path, world: int, *changes: dict[str, Any]) -> None:
        self._world = world
        self._changes = changes
        self.dir = RunDir(root / "core-1")
        self.dir.attempts.mkdir(parents=True)
        self.dir.code.mkdir()
        (self.dir.code / "snapshot.json").write_text(Snapshot().model_dump_json())
        self.samples = spec(world, *changes).data.options.get("samples", 40)

    def start(
        self,
        *changes: dict[str, Any],
        world: int | None = None,
        prepare: Callable[[int], None] | None = None,
    ) -> Ranks:
        """Claim the next attempt and start its ranks, each calling `prepare(rank)` first."""
        shaped = spec(world or self._world, *self._changes, *changes)
        ready = plan(shaped, run_id="core-1", run_dir=str(self.dir.path)).with_samples(self.samples)
        store = CheckpointStore(open_storage(ready.checkpoint_uri), ready.run_id)
        store.own()
        attempt = store.claim_next(None, None).attempt
        files = self.dir.attempt(attempt)
        files.logs.mkdir(parents=True)
        files.plan.write_text(ready.model_dump_json())
        return Ranks(self, ready, attempt, prepare)

    def train(self, *changes: dict[str, Any], world: int | None = None) -> list[int]:
        """Start the next attempt, wait for its end; the exit codes by rank."""
        with self.start(*changes, world=world) as ranks:
            return ranks.wait()

    def metrics(self) -> list[dict[str, Any]]:
        return list(read_lines(self.dir.metrics))

    def losses(self) -> list[float]:
        return [record["loss"] for record in self.metrics()]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [event for event in read_lines(self.dir.events) if event["event"] == name]

    def saved_steps(self) -> list[int]:
        return sorted(
            int(path.parent.name.removeprefix("step-"))
            for path in (self.dir.path / "checkpoints").glob(f"step-*/{MANIFEST_NAME}")
        )

    def trained_ids(self, step: int) -> list[int]:
        """The ids that all ranks together trained in `step`, in rank order."""
        return [
            sample
            for path in self.dir.sample_files()
            for record in read_lines(path)
            if record["step"] == step
            for sample in record["ids"]
        ]

    def checkpoint(self, step: int) -> Checkpoint:
        directory = self.dir.path / "checkpoints" / f"step-{step:08d}"
        manifest = CheckpointManifest.from_bytes((directory / MANIFEST_NAME).read_bytes())
        files = {entry.name: entry.size_bytes for entry in manifest.files}
        index, state = parse_index((directory / index_file(files)).read_bytes(), files)
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in tensor_shapes(index).items()
        }
        load_tensors(tensors, index, read=LocalStorage(directory).read_into, group=None)
        return Checkpoint(manifest, tensors, state)


class Ranks:
    """The running ranks of one attempt; killed when the block ends."""

    def __init__(
        self, run: Run, ready: Plan, attempt: int, prepare: Callable[[int], None] | None
    ) -> None:
        self._files = run.dir.attempt(attempt)
        self._world = ready.world_size
        common = rank_environment(os.environ, ready, run.dir, attempt)
        port = str(free_port())
        self._processes: list[BaseProcess] = []
        for rank in range(self._world):
            env = common | {
                "RANK": str(rank),
                "WORLD_SIZE": str(self._world),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(self._world),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            process = _server().Process(
                target=_as_rank,
                args=(env, str(run.dir.path), str(self._files.log(rank)), rank, prepare),
            )
            process.start()
            self._processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self._pid(rank), number)

    def data_workers(self, rank: int) -> list[int]:
        """The process ids of a rank's data workers."""
        pid = self._pid(rank)
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))

    def _pid(self, rank: int) -> int:
        pid = self._processes[rank].pid
        assert pid is not None
        return pid

    def wait_for_step(self, step: int) -> None:
        """Returns once rank 0 has recorded `step`."""
        self._wait_until(lambda: any(r["step"] >= step for r in read_lines(self._files.metrics)))

    def wait_for_handlers(self) -> None:
        """Returns once every rank takes stop signals, which it does before anything else."""
        self._wait_until(lambda: all(map(_catches_stops, self._processes)))

    def wait(self) -> list[int]:
        """The exit codes by rank; minus the signal for one that was killed."""
        deadline = time.monotonic() + _PATIENCE_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self._processes]
        assert None not in codes, f"still running after {_PATIENCE_S} s: {codes}\n{self.logs()}"
        return [code for code in codes if code is not None]

    def reports(self) -> list[RankReport]:
        texts = [self._files.report(rank).read_bytes() for rank in range(self._world)]
        return [RankReport.model_validate_json(text) for text in texts]

    def logs(self) -> str:
        paths = [self._files.log(rank) for rank in range(self._world)]
        return "\n".join(path.read_text() for path in paths if path.exists())

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.logs()
            assert all(p.exitcode is None for p in self._processes), self.logs()
            time.sleep(0.005)


def _as_rank(
    env: dict[str, str], run_dir: str, log: str, rank: int, prepare: Callable[[int], None] | None
) -> None:
    os.environ.clear()
    os.environ.update(env)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if prepare is not None:
        prepare(rank)
    from trainer.__main__ import main

    os._exit(main([run_dir]))


def _catches_stops(process: BaseProcess) -> bool:
    for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            caught = int(line.split()[1], 16)
            return all(caught >> (n - 1) & 1 for n in (signal.SIGTERM, signal.SIGUSR2))
    return False


@functools.cache
def _server() -> Any:
    """The process that all others are forked from, with torch and the trainer loaded."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # It keeps the environment that it is started in; by itself it would not find this directory.
    fixed = {**_FIXED, "PYTHONPATH": str(Path(__file__).parent)}
    before = {name: os.environ.get(name) for name in fixed}
    os.environ.update(fixed)
    multiprocessing.forkserver.ensure_running()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    return context
