"""What a test has of the Slurm cluster: Slurm's commands, ways to break it, and patience."""

from __future__ import annotations

import os
import pwd
import re
import secrets
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slurm.cluster import Cluster, NodeProcess
from slurm.processes import start_time
from slurm.settings import Settings
from tests.cluster.user_venv import make_user_venv
from tests.conftest import PATIENCE_S, Answer, wait_until

CLUSTER_COMMAND = Path(__file__).parents[2] / "slurm" / "cluster"
#: Slurm's longest legitimate pause here: a lost node (20 s), a grace time (20 s + KillWait), the
#: rest of a requeue, on a busy machine.
SLURM_PATIENCE_S = 120.0

_SEPARATOR = "\x1f"
_QUEUE_FIELDS = ("%A", "%j", "%u", "%P", "%T", "%N", "%r", "%k")
# A value may hold spaces: it ends where the next `Key=` begins.
_FIELD = re.compile(r"(\S+?)=(.*?)(?=\s+[A-Z][\w/:]*=|$)")


@dataclass(frozen=True)
class Queued:
    """A job as squeue shows it."""

    id: int
    name: str
    user: str
    partition: str
    state: str
    nodes: str
    reason: str
    comment: str


def without_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what a surrounding job or test session says of itself."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith(("SLURM_", "SBATCH_", "SRUN_", "VITRA_"))
    }


def cluster_command(*words: str | Path, within_s: float = 300.0) -> None:
    """Run `slurm/cluster`; fails if it does.

    It is always a process of its own, so that daemons that it starts outlive the tests and are
    nobody's children.
    """
    answer = subprocess.run(
        [sys.executable, CLUSTER_COMMAND, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=within_s,
        check=False,
    )
    assert answer.returncode == 0, f"slurm/cluster {' '.join(map(str, words))}: {answer.stderr}"


class ClusterHandle:
    """The running cluster.

    Attributes:
        settings: what it was started with.
        share: a directory of this test's own, which all nodes see and all users may write.
        nodes: the nodes' names.
    """

    def __init__(self, settings: Settings, share: Path) -> None:
        self.settings = settings
        self.share = share
        self.nodes = tuple(settings.node_names)
        self._cluster = Cluster(settings, say=lambda _line: None)

    # Who runs what, and where.

    @property
    def conf(self) -> Path:
        return self.settings.conf

    @property
    def user(self) -> str:
        """The name of an unprivileged user, who may submit."""
        return self.settings.user

    @property
    def host_address(self) -> str:
        """Where a server must listen that the nodes are to reach."""
        return self.settings.host_address

    @property
    def environ(self) -> dict[str, str]:
        """For commands of root's that use the cluster: this process's, made clean."""
        return {**without_slurm(os.environ), "SLURM_CONF": str(self.conf)}

    @property
    def user_environ(self) -> dict[str, str]:
        """For commands of the unprivileged user: a login's, with vitra in PATH."""
        return {
            "PATH": f"{self.user_venv}/bin:/usr/local/bin:/usr/bin:/bin",
            "HOME": pwd.getpwnam(self.user).pw_dir,
            "USER": self.user,
            "LOGNAME": self.user,
            "LANG": "C.UTF-8",
            "OMP_NUM_THREADS": "1",
            "SLURM_CONF": str(self.conf),
        }

    @cached_property
    def user_venv(self) -> Path:
        """A virtual environment with vitra that every user can use: bin/python, bin/vitra.

        Made at the first use in a session, in some seconds.
        """
        directory = self.settings.state / "user-venv"
        session = f"{os.getpid()} {start_time(os.getpid())}"
        made_by = directory / "made-by"
        if not made_by.exists() or made_by.read_text() != session:
            make_user_venv(directory, self._as_user)
            made_by.write_text(session)
        return directory

    def popen(
        self,
        argv: Sequence[str | Path],
        *,
        user: str | None = None,
        node: str | None = None,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start a command and leave it running; the test has to end and reap it.

        Args:
            argv: the command.
            user: who runs it, in `user_environ`; root in `environ` if None.
            node: where; on the host, as on a login node, if None.
            cwd: `share` if None.
            environ: more variables.
            stdout: as for subprocess.
            stderr: as for subprocess.
        """
        base = self.environ if user is None else self.user_environ
        prefix: list[str | Path] = []
        if node is not None:
            prefix += self._cluster.enter(node)
            # Entering the node's name spaces loses the directory.
            prefix += [f"--wdns={cwd or self.share}"]
        if user is not None:
            prefix += _become(user)
        return subprocess.Popen(
            [*prefix, *argv],
            cwd=cwd or self.share,
            env={**base, **(environ or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        user: str | None = None,
        node: str | None = None,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        code: int | None = 0,
        within_s: float = PATIENCE_S,
    ) -> Answer:
        """Run a command to the end; fails unless it exits with `code` (None: any) in time."""
        with self.popen(argv, user=user, node=node, cwd=cwd, environ=environ) as process:
            try:
                stdout, stderr = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        answer = Answer(process.returncode, stdout, stderr)
        assert code is None or answer.code == code, f"{argv}: {answer}"
        return answer

    def run_on(self, node: str, argv: Sequence[str | Path], *, user: str | None = None) -> Answer:
        """Run a command on a node, whatever Slurm thinks of it."""
        return self.run(argv, node=node, user=user)

    def processes(self, node: str | None = None) -> list[NodeProcess]:
        """What jobs have running, on one node or all; `pid` is this machine's, for os.kill."""
        return self._cluster.processes(node)

    # Slurm's commands.

    def sbatch(
        self,
        script: str,
        *options: str,
        user: str | None = None,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> int:
        """Submit a bash script, from `share` unless `cwd`; its output is slurm-JOB.out there.

        Returns:
            the job's id.
        """
        text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        path = self.share / f"script-{secrets.token_hex(4)}.sh"
        path.write_text(text)
        words = ["sbatch", "--parsable", "--open-mode=append", *options, path]
        return int(self.run(words, user=user, cwd=cwd, environ=environ).stdout)

    def output(self, job: int) -> str:
        """What a job submitted by `sbatch` has printed in all its lives."""
        path = self.share / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def scontrol(self, *words: str) -> str:
        """What `scontrol` prints; fails if it does."""
        return self.run(["scontrol", *words]).stdout

    def scancel(self, *words: str | int) -> None:
        self.run(["scancel", *map(str, words)])

    def show(self, job: int) -> dict[str, str]:
        """All that the controller says of a job, by the names it uses."""
        answer: list[str] = []

        def answered() -> bool:
            # Once in a long while it is empty, with exit code 0.
            answer[:] = self.scontrol("-o", "show", "job", str(job)).splitlines()
            return len(answer) == 1

        wait_until(answered, f"scontrol to show job {job}", SLURM_PATIENCE_S)
        return dict(_FIELD.findall(answer[0]))

    def state(self, job: int) -> str:
        """The job's state in full, such as PENDING."""
        return self.show(job)["JobState"]

    def restarts(self, job: int) -> int:
        """How often the job has been requeued."""
        return int(self.show(job)["Restarts"])

    def queue(self, *options: str) -> list[Queued]:
        """The jobs that are not over, as squeue shows them."""
        layout = _SEPARATOR.join(_QUEUE_FIELDS)
        lines = self.run(["squeue", "-h", "-a", "-o", layout, *options]).stdout.splitlines()
        fields = [line.split(_SEPARATOR) for line in lines]
        return [Queued(int(first), *others) for first, *others in fields]

    def jobs(self) -> list[int]:
        """The ids of the jobs that are not over."""
        return sorted({queued.id for queued in self.queue()})

    def sacct(self, job: int, *fields: str, lives: bool = True) -> list[dict[str, str]]:
        """A job's rows in the accounting, by field name; one for each of its lives.

        Args:
            job: its id.
            fields: more of sacct's fields than JobID, State, ExitCode, Start, End and NodeList.
            lives: False for what sacct says without -D: the newest life.
        """
        wanted = ("JobID", "State", "ExitCode", "Start", "End", "NodeList", *fields)
        words = ["sacct", "-X", "-n", "-P", "-j", str(job), f"--format={','.join(wanted)}"]
        rows = self.run([*words, "-D"] if lives else words).stdout.splitlines()
        return [dict(zip(wanted, row.split("|"), strict=True)) for row in rows]

    def preempt(
        self,
        n_nodes: int,
        *,
        nodes: Sequence[str] = (),
        within_s: float = SLURM_PATIENCE_S,
    ) -> int:
        """Take whole nodes away from whoever has them; returns once they are taken.

        Args:
            n_nodes: how many.
            nodes: which; Slurm chooses if none are named.
            within_s: the longest that the preempted may take to leave.

        Returns:
            the id of a job in `high` that keeps the nodes until it is cancelled.
        """
        where = [f"--nodelist={','.join(nodes)}"] if nodes else []
        job = self.sbatch(
            "exec sleep 3600",
            *("--partition=high", "--job-name=preemptor", "--exclusive", "--time=60"),
            *("--output=/dev/null", f"--nodes={n_nodes}", *where),
        )
        self.wait_for_state(job, "RUNNING", within_s=within_s)
        return job

    # Patience.

    def wait_for(
        self, what: str, true: Callable[[], object], within_s: float = SLURM_PATIENCE_S
    ) -> None:
        """Return once `true()` is; fails after `within_s`, naming `what` was waited for."""
        wait_until(true, what, within_s)

    def wait_for_state(self, job: int, *states: str, within_s: float = SLURM_PATIENCE_S) -> str:
        """Return the job's state once it is one of `states`."""
        seen: list[str] = []

        def reached() -> bool:
            seen[:] = [self.state(job)]
            return seen[0] in states

        wait_until(reached, f"job {job} to be {' or '.join(states)}", within_s)
        return seen[0]

    def wait_for_output(self, job: int, text: str, within_s: float = SLURM_PATIENCE_S) -> None:
        """Return once a job submitted by `sbatch` has printed `text`."""
        wait_until(lambda: text in self.output(job), f"{text!r} from job {job}", within_s)

    def wait_until_over(self, job: int, within_s: float = SLURM_PATIENCE_S) -> None:
        """Return once the job is no longer in the queue."""
        wait_until(lambda: job not in self.jobs(), f"job {job} to leave the queue", within_s)

    # Trouble.

    def crash(self, node: str) -> None:
        """Power-cut a node: every process on it dies at once."""
        cluster_command("crash", node)

    def boot(self, node: str) -> None:
        """Start it again; returns once Slurm may use it."""
        cluster_command("boot", node)

    def cut(self, node: str) -> None:
        """Take a node off the network; what runs on it goes on."""
        cluster_command("cut", node)

    def heal(self, node: str) -> None:
        """Undo `cut`."""
        cluster_command("heal", node)

    def down(self, daemon: str) -> None:
        """Stop slurmctld or slurmdbd alone."""
        cluster_command("down", daemon)

    def up(self, daemon: str) -> None:
        """Start it again; returns once it answers."""
        cluster_command("up", daemon)

    def set_conf(self, *lines: str) -> None:
        """Change slurm.conf until the next test, such as `JobRequeue=0`; none: back to normal."""
        cluster_command("set", *lines)

    def clear(self) -> None:
        """No jobs, nothing broken or changed, every node idle."""
        cluster_command("clear")

    def describe(self) -> str:
        """Queue, nodes, stray processes and the newest of the controller's log, for a report."""
        queue = self.run(["squeue", "-a"], code=None)
        nodes = self.run(["sinfo", "-N", "-l"], code=None)
        log = (self.settings.log / "slurmctld.log").read_text(errors="replace").splitlines()
        lines = [f"{p.node} {p.pid} {' '.join(p.argv)[:150]}" for p in self.processes()]
        parts = [queue.stdout + queue.stderr, nodes.stdout + nodes.stderr, *lines, *log[-40:]]
        return "\n".join([*parts, f"files of this test: {self.share}"])

    def _as_user(self, argv: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*_become(self.user), *argv],
            env={"PATH": "/usr/bin:/bin", "HOME": pwd.getpwnam(self.user).pw_dir},
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )


def _become(user: str) -> list[str | Path]:
    # setpriv itself still has root's rights when it looks for the command; env has not.
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "env", "--"]
