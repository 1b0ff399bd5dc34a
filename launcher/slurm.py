"""What Slurm says and does: each command of it that vitra uses, with a time-out and a typed answer.

`scontrol` and `squeue` ask the controller and are believed. `sacct` asks the accounting, which lags
behind and may not exist: only for what the controller has forgotten, and for the cause of an end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launcher import shell
from launcher.environment import without_stale
from launcher.slurm_answers import (
    Job,
    NodeKind,
    Partition,
    PastLife,
    fields,
    job_of,
    node_kinds,
    number_of,
    partition_of,
    past_lives,
    queued_jobs,
)
from trainer.spec.errors import SchedulerError, SchedulerRejected, SchedulerUnavailable

#: For the controller; a healthy one answers within milliseconds, a busy one within seconds.
ANSWER_S = 20.0
#: For the accounting, which nothing that cannot wait may depend on.
HISTORY_S = 10.0
#: For a node that is asked whether it lives; a healthy one answers within a second.
PROBE_S = 15.0

_NO_SUCH_JOB = "Invalid job id specified"
#: What Slurm's commands say when it is not the request that is at fault.
_OUT_OF_REACH = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Connection refused",
    "Connection timed out",
    "Unexpected message received",
    "Slurm backup controller in standby mode",
    "try again",
    "temporarily unable",
    "Protocol authentication error",
)
#: Variables that change what squeue and its like show.
_TASTES = ("SQUEUE_", "SACCT_", "SINFO_", "SCANCEL_", "SCONTROL_")
_HOST_NAME = re.compile(r"[\w.-]+")
_TRIES = 4


class Slurm:
    """Slurm's commands, run with nothing of the surrounding shell's Slurm variables but SLURM_CONF.

    Every method raises SchedulerUnavailable when there is no answer, and SchedulerRejected when the
    answer is no.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._job_environ = without_stale(environ)
        own = {n: v for n, v in self._job_environ.items() if not n.startswith(_TASTES)}
        self._environ = {**own, "LC_ALL": "C"}

    @property
    def job_environ(self) -> Mapping[str, str]:
        """What a job inherits from the shell that submits it."""
        return self._job_environ

    def job(self, job_id: str) -> Job | None:
        """The job; None once the controller has forgotten it."""
        try:
            text = self._ask("scontrol", "-o", "show", "job", job_id)
        except SchedulerRejected as err:
            if _NO_SUCH_JOB in err.message:
                return None
            raise
        found = [job_of(fields(line)) for line in text.splitlines() if line.strip()]
        return next((job for job in found if job.job_id == job_id), None)

    def jobs(self, *users: int) -> list[Job]:
        """All jobs of these users, by uid, that the controller still knows, ended ones too."""
        columns = "%i|%T|%S|%N|%r|%V|%j|%k"
        who = ",".join(map(str, users))
        # -a: also those in partitions that are hidden.
        argv = ("squeue", "-a", "-h", "-u", who, "-t", "all", "-o", columns)
        return queued_jobs(self._ask(*argv, empty_is_fine=True))

    def history(self, *job_ids: str, timeout_s: float = HISTORY_S) -> list[PastLife]:
        """The lives of jobs, oldest first; empty where the accounting knows nothing of them.

        A number may have been used by another job before: see `name` and `submitted_at`.
        """
        columns = "JobID,State,ExitCode,Submit,End,NodeList,JobName"
        text = self._ask(
            *("sacct", "-D", "-X", "-n", "-P", "-j", ",".join(job_ids), "-o", columns),
            timeout_s=timeout_s,
            empty_is_fine=True,
        )
        return [life for life in past_lives(text) if life.job_id in job_ids]

    def test(self, script: bytes) -> str:
        """What `sbatch --test-only` says of a batch script: when and where it could start.

        Raises:
            SchedulerRejected: it never could, or not as things are.
        """
        # It answers on standard error.
        return self._answer("sbatch", "--test-only", stdin=script).stderr.strip()

    def submit(self, script: Path, *options: str) -> str:
        """Submit a batch script with further options; returns the job's id.

        Asked once only: where there is no answer, there may be a job all the same.
        """
        argv = ("sbatch", "--parsable", *options, str(script))
        answer = self._answer(*argv, environ=self._job_environ)
        return answer.stdout.decode(errors="replace").strip().partition(";")[0]

    def requeue(self, job_id: str) -> None:
        """Put a job back into the queue.

        Raises:
            SchedulerError: Slurm refused, or cannot be reached.
        """
        self._ask("scontrol", "requeue", job_id, empty_is_fine=True)

    def allow_requeue(self, job_id: str) -> None:
        """Lift --no-requeue, or a site's JobRequeue=0, from one job."""
        self._ask("scontrol", "update", f"JobId={job_id}", "Requeue=1", empty_is_fine=True)

    def cancel(self, job_id: str, *, waiting_only: bool = False) -> None:
        """Cancel a job; nothing where it has gone already, or runs and is only to go if it waits"""
        only = ("--state=PENDING",) if waiting_only else ()
        try:
            self._ask("scancel", *only, job_id, empty_is_fine=True)
        except SchedulerRejected as err:
            if _NO_SUCH_JOB not in err.message:
                raise

    def steps(self, job_id: str) -> list[str]:
        """The job's steps that were started by srun, as JOB.STEP."""
        text = self._ask("squeue", "-h", "-s", "-j", job_id, "-o", "%i", empty_is_fine=True)
        found = [line.strip() for line in text.splitlines()]
        return [step for step in found if step.rpartition(".")[2].isdigit()]

    def signal_step(self, step: str, name: str) -> None:
        """Send a signal to every task of a step; nothing where it has ended."""
        try:
            self._ask("scancel", f"--signal={name}", step, empty_is_fine=True)
        except SchedulerRejected as err:
            if "Invalid job" not in err.message and "already" not in err.message:
                raise

    def host_names(self, node_list: str) -> list[str]:
        """The nodes that a list such as node[1-3,7] stands for, in its order."""
        names = self._ask("scontrol", "show", "hostnames", node_list).split()
        if not all(_HOST_NAME.fullmatch(name) for name in names):
            # Of a list that is cut off, scontrol makes names that nobody has.
            raise SchedulerRejected(f"{node_list!r} is no list of nodes")
        return names

    def unusable(self, nodes: Sequence[str]) -> list[str]:
        """Those of the nodes that are down or do not answer (Slurm marks these with a star)."""
        text = self._ask("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N|%T")
        found: dict[str, str] = {}
        for line in text.splitlines():
            name, _, state = line.strip().partition("|")
            found[name] = state.lower()
        return [
            name
            for name in nodes
            if found.get(name, "").endswith("*") or found.get(name, "").startswith(("down", "fail"))
        ]

    def nodes_answer(self, job_id: str, nodes: Sequence[str]) -> bool:
        """Whether these nodes of a job run a step of it now; False where that is not sure."""
        where = (f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", f"--nodelist={','.join(nodes)}")
        try:
            self._ask(
                *("srun", f"--jobid={job_id}", *where, "--overlap", "--mem=0", "--mpi=none"),
                *("--input=none", "true"),
                timeout_s=PROBE_S,
                empty_is_fine=True,
            )
        except SchedulerError:
            return False
        return True

    def slurmd_timeout_s(self) -> float:
        """After how many seconds without an answer a node is down."""
        for line in self._ask("scontrol", "show", "config").splitlines():
            name, _, value = line.partition("=")
            if name.strip() == "SlurmdTimeout":
                return float(number_of(value.strip()))
        return 300.0

    def out_of_service(self, partition: str) -> list[str]:
        """The nodes of a partition that take no jobs at the moment: down, drained, reserved."""
        text = self._ask("sinfo", "-h", "-N", "-p", partition, "-o", "%N|%T")
        lines = [line.strip().partition("|") for line in text.splitlines()]
        return [
            name
            for name, _, state in lines
            if not re.fullmatch(r"(idle|mix|alloc|compl)\w*", state)
        ]

    def version(self) -> str:
        """Slurm's name and version, as its commands say it."""
        return self._ask("scontrol", "--version").strip()

    def ping(self) -> str:
        """Which controllers there are, and how they are.

        Raises:
            SchedulerUnavailable: none is up.
        """
        text = " ".join(self._ask("scontrol", "ping").split())
        if " UP" not in text:
            raise SchedulerUnavailable(f"no controller is up: {text}")
        return text

    def on_a_node(
        self,
        argv: Sequence[str],
        options: Sequence[str],
        *,
        within_s: int,
        timeout_s: float,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """What a program prints on some compute node.

        Args:
            options: srun's, for which node.
            within_s: for how long a free node is waited for.
            timeout_s: for how long the program may run then.
            environ: all that it finds around it; None: what Slurm's commands find.

        Raises:
            SchedulerUnavailable: none was free, or there was no answer. SchedulerRejected: Slurm
                refuses, or the program failed.
        """
        words = ("srun", "--nodes=1", "--ntasks=1", "--mpi=none", "--input=none", "--quiet")
        limits = (f"--immediate={within_s}", "--time=2", "--job-name=vitra-doctor")
        return self._ask(
            *(*words, *limits, *options, *argv),
            timeout_s=within_s + timeout_s,
            empty_is_fine=True,
            environ=environ,
        )

    def partitions(self) -> dict[str, Partition]:
        """All partitions, by name.

        Raises:
            SchedulerError: Slurm cannot be asked.
        """
        text = self._ask("scontrol", "-a", "-o", "show", "partition")
        found = [partition_of(fields(line)) for line in text.splitlines() if line.strip()]
        return {partition.name: partition for partition in found}

    def default_partition(self) -> str | None:
        """The partition of jobs that name none; None where there is no such."""
        text = self._ask("scontrol", "-a", "-o", "show", "partition")
        for line in text.splitlines():
            facts = fields(line)
            if facts.get("Default") == "YES":
                return facts["PartitionName"]
        return None

    def node_kinds(self, partition: str) -> list[NodeKind]:
        """What nodes a partition has.

        Raises:
            SchedulerError: Slurm cannot be asked.
        """
        # -e: nodes that differ in anything are not taken together.
        text = self._ask("sinfo", "-h", "-e", "-p", partition, "-o", "%D|%c|%m|%G")
        return node_kinds(text)

    def _ask(
        self,
        *argv: str,
        timeout_s: float = ANSWER_S,
        empty_is_fine: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """One command's standard output."""
        for attempt in range(_TRIES):
            answer = self._answer(*argv, timeout_s=timeout_s, environ=environ)
            text = answer.stdout.decode(errors="replace")
            if text.strip() or empty_is_fine:
                return text
            # Under load scontrol has been seen to print nothing and call it success.
            time.sleep(0.05 * 2**attempt)
        raise SchedulerUnavailable(f"{argv[0]} {argv[1]} answered with nothing")

    def _answer(
        self,
        *argv: str,
        stdin: bytes = b"",
        timeout_s: float = ANSWER_S,
        environ: Mapping[str, str] | None = None,
    ) -> shell.Answer:
        env = self._environ if environ is None else environ
        try:
            answer = shell.run(argv, timeout_s=timeout_s, stdin=stdin, env=env)
        except shell.CommandTimedOut as err:
            raise SchedulerUnavailable(err.message) from err
        except OSError as err:
            raise no_such_command(argv[0], err) from err
        if answer.returncode:
            raise refusal(argv[0], answer.stderr)
        return answer


def no_such_command(program: str, err: OSError) -> SchedulerUnavailable:
    """The error where a command of Slurm's cannot be run."""
    return SchedulerUnavailable(
        f"{program} cannot be run: {err.strerror}",
        "submit from a machine that has Slurm's commands, or add --local (--dry-run shows the "
        "batch script)",
    )


def refusal(program: str, stderr: str) -> SchedulerUnavailable | SchedulerRejected:
    """The error that a command's complaint stands for."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    said = "; ".join(line.removeprefix(f"{program}: ").removeprefix("error: ") for line in lines)
    kind = SchedulerUnavailable if is_out_of_reach(stderr) else SchedulerRejected
    return kind(f"{program}: {said or 'failed without a word'}")


def is_out_of_reach(stderr: str) -> bool:
    """Whether a command failed because the controller or the accounting could not be asked."""
    return any(words.lower() in stderr.lower() for words in _OUT_OF_REACH)
