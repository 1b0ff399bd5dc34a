"""The ranks of an attempt as a job step: srun, within the job that the supervisor runs in."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from launcher import shell
from launcher.container import (
    Command,
    all_mounts,
    container_command,
    container_of,
    make_mount_points,
)
from launcher.environment import rank_environment, with_own_code
from launcher.request import gpu_options
from launcher.schedulers.ports import free_port
from launcher.slurm import Slurm
from launcher.slurm_env import BatchJob
from trainer.spec.errors import SchedulerError, SchedulerUnavailable
from trainer.spec.fields import one_line
from trainer.spec.outcome import RankExit
from trainer.spec.plan import Plan
from trainer.spec.rundir import AttemptDir, RunDir
from trainer.spec.snapshot import Snapshot

#: How long the end of a step that was killed may take; on a node that is gone, it takes for ever.
_KILL_S = 10.0
#: While the controller does not answer, how long to go on trying to have ranks ended.
_INSIST_S = 60.0
_AGAIN_S = 2.0
#: How long the record of a rank that has ended may take to be seen through a shared file system.
_SEEN_WITHIN_S = 3.0
#: How often a stop is passed on while there are tasks that have not begun.
_STOP_EVERY_S = 10.0
#: Characters of what was said of a task that did not start.
_SHOWN = 300
#: srun only counts ends, and when one task has ended slurmstepd tells of ending the others.
_SAYS_NO_CAUSE = re.compile(r"^srun: |\*\*\* STEP \S+ ON \S+ CANCELLED ")
_EXIT_FILE = re.compile(r"rank_(\d+)\.exit")


class SlurmLauncher:
    """Starts the ranks by srun: every attempt is a step of its own.

    Args:
        slurm: the commands.
        job: the job that this process runs in.
        environ: the surrounding environment.
        working_dir: where the ranks run; the run directory where it is gone.
    """

    def __init__(
        self, slurm: Slurm, job: BatchJob, environ: Mapping[str, str], working_dir: Path
    ) -> None:
        self._slurm = slurm
        self._job = job
        self._environ = environ
        self._working_dir = working_dir

    @property
    def address(self) -> str:
        return os.uname().nodename

    def start(
        self, run_dir: RunDir, plan: Plan, attempt: int, more: Mapping[str, str]
    ) -> SlurmRanks:
        """Start every rank's task, in the run's container if it has one.

        Raises:
            SchedulerUnavailable: the job has fewer nodes than planned, or no srun.
            UsageError: the container cannot be given what the ranks need.
        """
        hosts = self._hosts()
        if len(hosts) < plan.nodes:
            raise SchedulerUnavailable(f"the job has {len(hosts)} nodes, the plan {plan.nodes}")
        # Nodes beyond the plan stay idle. Rank 0 runs on the first.
        hosts = hosts[: plan.nodes]
        own = {
            "LOCAL_WORLD_SIZE": str(plan.tasks_per_node),
            "MASTER_ADDR": hosts[0],
            # An orphan of an older attempt may still listen, so each attempt has its own ports.
            "MASTER_PORT": str(free_port(random.Random(f"{plan.run_id}/{attempt}"))),
        }
        env = with_own_code(
            {**rank_environment(self._environ, plan, run_dir, attempt), **more, **own},
            run_dir,
            Snapshot.read(run_dir),
        )
        working_dir = self._working_dir if self._working_dir.is_dir() else run_dir.path
        files = run_dir.attempt(attempt)
        command = _task_command(plan, run_dir, working_dir, env)
        process = shell.start(
            self._command(run_dir, plan, hosts, working_dir, command),
            log=files.logs / "srun.log",
            env=command.environ,
            cwd=run_dir.path,
        )
        return SlurmRanks(self._slurm, self._job, process, files, plan, hosts)

    def _command(
        self,
        run_dir: RunDir,
        plan: Plan,
        hosts: Sequence[str],
        working_dir: Path,
        command: Command,
    ) -> list[str]:
        resources = plan.spec.resources
        return [
            "srun",
            f"--jobid={self._job.job_id}",
            # Explicit, all of it: srun inherits some of the job's options, some not, by version.
            f"--nodes={plan.nodes}",
            f"--ntasks={plan.world_size}",
            f"--ntasks-per-node={plan.tasks_per_node}",
            "--distribution=block",
            f"--nodelist={','.join(hosts)}",
            f"--cpus-per-task={resources.cpus_per_task or 1}",
            "--mem=0",
            *(f"--{name}={value}" for name, value in gpu_options(resources)),
            # A task that leaves no word of its rank: killed, most likely.
            "--kill-on-bad-exit=1",
            "--mpi=none",
            "--input=none",
            f"--chdir={working_dir}",
            *command.options,
            *(*command.words, "-P", "-m", "launcher.task", str(run_dir.path)),
        ]

    def _hosts(self) -> list[str]:
        return self._slurm.host_names(self._job.nodes)


def _task_command(
    plan: Plan, run_dir: RunDir, working_dir: Path, env: Mapping[str, str]
) -> Command:
    """Which Python runs the tasks, and in what."""
    container = container_of(plan.spec)
    if container is None:
        return Command((), (sys.executable,), env)
    mounts = all_mounts(container, plan, working_dir)
    make_mount_points(container, mounts)
    return container_command(container, plan, run_dir, working_dir, mounts, env)


class SlurmRanks:
    """The tasks of one step.

    What srun returns is no evidence: with one rank failed it gives another's code. Each task leaves
    a record of its rank's end; a rank without one when srun has ended is lost.
    """

    def __init__(
        self,
        slurm: Slurm,
        job: BatchJob,
        process: shell.Process,
        files: AttemptDir,
        plan: Plan,
        hosts: Sequence[str],
    ) -> None:
        self._slurm = slurm
        self._job = job
        self._process = process
        self._files = files
        self._plan = plan
        self._hosts = hosts
        self._ended: dict[int, RankExit] = {}
        self._gone_at: float | None = None
        #: When to pass a stop on to those that have begun, if the others do not begin before.
        self._stop_due_at: float | None = None

    def poll(self) -> dict[int, RankExit]:
        self._pass_on_stop()
        if self._gone_at is None and self._process.poll() is not None:
            self._gone_at = time.monotonic()
        self._read_exits()
        missing = self._plan.world_size - len(self._ended)
        gone_s = 0.0 if self._gone_at is None else time.monotonic() - self._gone_at
        if missing and gone_s > _SEEN_WITHIN_S:
            self._count_lost()
        return dict(self._ended)

    def ask_to_stop(self) -> None:
        self._stop_due_at = time.monotonic() + _STOP_EVERY_S
        self._pass_on_stop()

    def ask_for_stacks(self) -> None:
        # srun would take this signal for itself.
        self._signal_steps("QUIT")

    def kill(self) -> None:
        if self._process.poll() is None:
            signalled = self._signal_steps("KILL")
            deadline = time.monotonic() + _INSIST_S
            while not signalled and len(self.poll()) < self._plan.world_size:
                # Ranks that nobody ends would run on beside their successors.
                if signalled is False or time.monotonic() > deadline:
                    break
                time.sleep(_AGAIN_S)
                signalled = self._signal_steps("KILL")
            try:
                self._process.wait(_KILL_S if signalled else 0.0)
            except subprocess.TimeoutExpired:
                # A node is gone, or Slurm cannot be asked, or has given the job up: the step is
                # left to Slurm.
                self._signal_srun(signal.SIGKILL)
                self._process.wait(_KILL_S)
        self._gone_at = self._gone_at or time.monotonic()
        deadline = time.monotonic() + 2 * _SEEN_WITHIN_S
        while len(self.poll()) < self._plan.world_size and time.monotonic() < deadline:
            time.sleep(0.05)

    def _pass_on_stop(self) -> None:
        """Pass a stop on, once every task hears it: srun forgets a signal that comes before.

        A task that hears it again ignores that.
        """
        if self._stop_due_at is None:
            return
        if all(self._files.log(rank).exists() for rank in range(self._plan.world_size)):
            self._stop_due_at = None
        elif time.monotonic() < self._stop_due_at:
            return
        else:
            self._stop_due_at += _STOP_EVERY_S
        # srun passes this one on. On TERM it would have the ranks killed.
        self._signal_srun(signal.SIGUSR2)

    def _signal_srun(self, number: int) -> None:
        # Not reaped yet, so the pid is still its own.
        if self._process.poll() is None:
            self._process.send_signal(number)

    def _signal_steps(self, name: str) -> bool | None:
        """Signal every task. None: Slurm cannot be asked. False: the job has been given up.

        The step of the job's next life has the same number, and is not this one's to end.
        """
        try:
            job = self._slurm.job(self._job.job_id)
            if job is None or job.restarts > self._job.restarts:
                return False
            for step in self._slurm.steps(self._job.job_id):
                self._slurm.signal_step(step, name)
        except SchedulerError as err:
            with (self._files.logs / "srun.log").open("a") as log:
                log.write(f"vitra: {err}\n")
            return None
        return True

    def _read_exits(self) -> None:
        try:
            paths = list(self._files.path.iterdir())
        except OSError:
            return
        for path in paths:
            found = _EXIT_FILE.fullmatch(path.name)
            if found is None or int(found[1]) in self._ended:
                continue
            try:
                end = RankExit.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            self._ended[end.rank] = end

    def _count_lost(self) -> None:
        last_words = self._last_words()
        for rank in range(self._plan.world_size):
            if rank not in self._ended:
                self._ended[rank] = RankExit(
                    rank=rank,
                    node=self._hosts[rank // self._plan.tasks_per_node],
                    signal=signal.SIGKILL,
                    ended_at=time.time(),
                    is_lost=True,
                    not_started=None if self._files.log(rank).exists() else last_words,
                )

    def _last_words(self) -> str | None:
        """What Slurm, or what it was to start the tasks with, said last of the cause."""
        try:
            text = (self._files.logs / "srun.log").read_text(errors="replace")
        except OSError:
            return None
        lines = [line for line in text.splitlines() if line.strip()]
        telling = [line for line in lines if not _SAYS_NO_CAUSE.search(line)] or lines
        return one_line(telling[-1].strip())[:_SHOWN] if telling else None
