"""The local scheduler: nodes x tasks_per_node processes on this machine."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from launcher import shell
from launcher.environment import rank_environment, with_own_code
from launcher.schedulers.base import Interruption
from launcher.schedulers.ports import free_port
from trainer.spec.errors import SchedulerUnavailable
from trainer.spec.outcome import RankExit, Verdict
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot

_ADDRESS = "127.0.0.1"
_REAP_S = 10.0


class LocalLauncher:
    """Starts every rank as a child of this process, each in a session of its own.

    Args:
        environ: the surrounding environment.
        working_dir: where the ranks run, so that relative paths in a spec's options mean the same
            in every attempt; the run directory where it is gone.
    """

    def __init__(self, environ: Mapping[str, str], working_dir: Path) -> None:
        self._environ = environ
        self._working_dir = working_dir

    @property
    def address(self) -> str:
        return _ADDRESS

    def start(
        self, run_dir: RunDir, plan: Plan, attempt: int, more: Mapping[str, str]
    ) -> LocalRanks:
        port = free_port()
        common = with_own_code(
            {**rank_environment(self._environ, plan, run_dir, attempt), **more},
            run_dir,
            Snapshot.read(run_dir),
        )
        working_dir = self._working_dir if self._working_dir.is_dir() else run_dir.path
        processes: list[shell.Process] = []
        group = LocalRanks(run_dir, attempt, processes)
        try:
            for rank in range(plan.world_size):
                env = common | {
                    "RANK": str(rank),
                    "WORLD_SIZE": str(plan.world_size),
                    # However many nodes the plan has, here all ranks share this one.
                    "LOCAL_RANK": str(rank),
                    "LOCAL_WORLD_SIZE": str(plan.world_size),
                    "MASTER_ADDR": _ADDRESS,
                    "MASTER_PORT": str(port),
                    "VITRA_PARENT_PID": str(os.getpid()),
                }
                argv = [sys.executable, "-P", "-m", "launcher.task", str(run_dir.path)]
                log = run_dir.attempt(attempt).log(rank)
                processes.append(shell.start(argv, log=log, env=env, cwd=working_dir))
        except OSError as err:
            group.kill()
            raise SchedulerUnavailable(f"cannot start rank {len(processes)}: {err}") from err
        return group


class LocalRanks:
    """The rank processes of one local attempt."""

    def __init__(self, run_dir: RunDir, attempt: int, processes: list[shell.Process]) -> None:
        self._files = run_dir.attempt(attempt)
        self._processes = processes
        self._ended: dict[int, RankExit] = {}

    def poll(self) -> dict[int, RankExit]:
        for rank, process in enumerate(self._processes):
            if rank not in self._ended and process.poll() is not None:
                self._ended[rank] = self._read_exit(rank, process.returncode)
        return dict(self._ended)

    def ask_to_stop(self) -> None:
        self._signal(signal.SIGUSR2, whole_tree=False)

    def ask_for_stacks(self) -> None:
        self._signal(signal.SIGQUIT, whole_tree=False)

    def kill(self) -> None:
        self._signal(signal.SIGKILL, whole_tree=True)
        deadline = time.monotonic() + _REAP_S
        while len(self.poll()) < len(self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)

    def _signal(self, number: int, *, whole_tree: bool) -> None:
        for rank, process in enumerate(self._processes):
            # A process that poll() has not reaped keeps its pid, so no stranger can be hit.
            if rank in self._ended:
                continue
            if whole_tree:
                os.killpg(process.pid, number)
            else:
                os.kill(process.pid, number)

    def _read_exit(self, rank: int, returncode: int) -> RankExit:
        """The rank's own record, or what its task's end tells where it could leave none."""
        try:
            return RankExit.model_validate_json(self._files.exit(rank).read_bytes())
        except (OSError, ValidationError):
            return RankExit(
                rank=rank,
                node=os.uname().nodename,
                exit_code=returncode if returncode >= 0 else None,
                signal=-returncode if returncode < 0 else None,
                ended_at=time.time(),
            )


class Terminal:
    """What a local supervisor lives in: a person stops it, and nobody else does."""

    insists = True

    @property
    def signals(self) -> Sequence[int]:
        numbers = [signal.SIGINT, signal.SIGTERM]
        # The terminal has gone, as when a connection drops; nohup asks for that to be ignored.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        return numbers

    def heed(self, number: int) -> Interruption:
        return Interruption(Verdict.CANCELLED, f"stopped by {signal.Signals(number).name}")

    def look(self) -> None:
        return None

    def why_ended(self, lost: Sequence[int], signals: Callable[[], Sequence[int]]) -> None:
        del lost, signals

    def start_again(self, verdict: Verdict, interruption: Interruption | None) -> bool:
        del verdict, interruption
        return True

    def stay_away(self) -> None:
        """Nothing was arranged."""
