"""What is asked of Slurm, as a value, and the one place where it becomes a batch script.

`build_request` turns a plan into a `SubmitRequest`, `render` that into the script's text. The dry
run prints this text and submit sends it, byte for byte. Both functions are pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from pydantic import BaseModel, ConfigDict, Field

from launcher.jobs import job_comment
from trainer.spec.errors import UsageError
from trainer.spec.plan import Plan
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.run import ResourcesSpec
from trainer.spec.safety import text_problem

#: How often one job may be requeued because its supervisor was killed outright (kill -9, out of
#: memory). Without a bound, a supervisor that is killed at every start requeues its job for ever.
GUARD_BUDGET = 2

_PLAIN = re.compile(r"[A-Za-z0-9@%+=,./_:-]*")
#: Wherever sbatch finds one of these in a directive, it blanks it out and begins another component.
_SEPARATORS = re.compile("hetjob|packjob", re.IGNORECASE)


class SubmitRequest(BaseModel):
    """One batch job: its shape, its limits, and what it runs.

    The fields that name an option of sbatch hold that option's value; None means that it is not
    given. `nodes` is a count or "min-max". At most one of `gpus_per_node` and `gres` is set. In
    `additional_parameters` a value of None is an option without a value. `env` is exported before
    the `setup` lines, which are the only text here that a shell interprets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    run_id: str
    run_dir: str
    python: str
    job_name: str
    nodes: str
    ntasks_per_node: int = Field(ge=1)
    gpus_per_node: str | None = None
    gres: str | None = None
    cpus_per_task: int | None = None
    mem_gb: int | None = None
    time_limit_min: int = Field(ge=1)
    signal_lead_s: int = Field(ge=1)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    reservation: str | None = None
    additional_parameters: tuple[tuple[str, str | None], ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()

    @property
    def comment(self) -> str:
        """The job's comment, by which the job of a run is found."""
        return job_comment(self.run_id)


def build_request(plan: Plan, *, python: str) -> SubmitRequest:
    """The request of a plan.

    Args:
        python: the interpreter that runs the supervisor, as an absolute path. It must be the
            program itself: with a wrapper in between, signals would end there.

    Raises:
        UsageError: the run directory or the interpreter has a path that sbatch cannot take.
    """
    _check_path("the run directory", plan.run_dir, "choose another run_root")
    _check_path("the Python interpreter", python, "use one with a plain path")
    if "\\" in plan.run_dir:
        # In the name of a log file Slurm drops backslashes, and with them all its replacements.
        raise UsageError(
            f"the run directory {plan.run_dir} has a backslash in its path, which Slurm drops from "
            "the names of log files",
            "choose another run_root",
        )
    resources = plan.spec.resources
    counts = [shape.nodes for shape in plan.elastic] or [plan.nodes]
    least, most = min(counts), max(counts)
    gpus = dict(gpu_options(resources))
    return SubmitRequest(
        run_id=plan.run_id,
        run_dir=plan.run_dir,
        python=python,
        job_name=plan.spec.name,
        nodes=str(most) if least == most else f"{least}-{most}",
        ntasks_per_node=plan.tasks_per_node,
        gpus_per_node=gpus.get("gpus-per-node"),
        gres=gpus.get("gres"),
        cpus_per_task=resources.cpus_per_task,
        mem_gb=resources.mem_gb,
        time_limit_min=plan.time_limit_min,
        signal_lead_s=resources.signal_lead_s,
        partition=resources.partition,
        account=resources.account,
        qos=resources.qos,
        constraint=resources.constraint,
        exclude=resources.exclude,
        nodelist=resources.nodelist,
        reservation=resources.reservation,
        additional_parameters=tuple(
            (name, value if isinstance(value, str) else None)
            for name, value in resources.additional_parameters.items()
        ),
        env=tuple((name, value) for name, value in resources.env.items() if value is not None),
        setup=resources.setup,
    )


def gpu_options(resources: ResourcesSpec) -> list[tuple[str, str]]:
    """The option by which this cluster wants GPUs asked for, of sbatch and srun; at most one."""
    if not resources.gpu_count or resources.gpu_request == "none":
        return []
    gpus = ":".join(filter(None, (resources.gpu_type, str(resources.gpu_count))))
    if resources.gpu_request == "gres":
        return [("gres", f"gpu:{gpus}")]
    return [("gpus-per-node", gpus)]


def render(request: SubmitRequest) -> str:
    """The batch script of a request: the text that sbatch gets on its standard input."""
    command = [request.python, "-P", "-m", "launcher.job", request.run_dir]
    own = [f"export {name}={shlex.quote(value)}" for name, value in request.env]
    own.extend(request.setup)
    lines = [
        "#!/bin/bash",
        f"# Run {request.run_id}. Written by vitra; to run it again, use `vitra resume`.",
        *(f"#SBATCH {directive}" for directive in _directives(request)),
        "",
        _TRAPS,
        *([*own, ""] if own else []),
        "# Whatever shell options the lines above have set must not reach the ones below.",
        "set +eum +o pipefail",
        f"unset {' '.join(LAUNCH_VARIABLES)}",
        "# The run's own copy of vitra; where none was needed, there is no such directory.",
        f"export PYTHONPATH={shlex.quote(f'{request.run_dir}/code/vitra')}"
        '"${PYTHONPATH:+:$PYTHONPATH}"',
        f"vitra_run_dir={shlex.quote(request.run_dir)}",
        f"vitra_command=({shlex.join(command)})",
        f"vitra_budget={GUARD_BUDGET}",
        "",
        _SUPERVISE,
    ]
    return "\n".join(lines) + "\n"


def sbatch_word(text: str) -> str:
    """`text` written so that sbatch, reading a directive, gets it as one word.

    sbatch splits at white space, knows single and double quotes, takes a backslash inside and
    outside of both for an escape, and begins a comment at a bare #.
    """
    if not _PLAIN.fullmatch(text):
        text = '"' + re.sub(r'[\\"]', r"\\\g<0>", text) + '"'
    return _SEPARATORS.sub(lambda found: f"{found[0][0]}\\{found[0][1:]}", text)


def _directives(request: SubmitRequest) -> Iterator[str]:
    """The options in sbatch's spelling, each quoted for a directive."""
    log = request.run_dir.replace("%", "%%") + "/batch-%j.log"
    options: list[tuple[str, str | int | None]] = [
        ("job-name", request.job_name),
        ("comment", request.comment),
        ("output", log),
        ("open-mode", "append"),
        ("signal", f"B:USR2@{request.signal_lead_s}"),
        ("time", request.time_limit_min),
        ("nodes", request.nodes),
        ("ntasks-per-node", request.ntasks_per_node),
        ("gpus-per-node", request.gpus_per_node),
        ("gres", request.gres),
        ("cpus-per-task", request.cpus_per_task),
        ("mem", None if request.mem_gb is None else f"{request.mem_gb}G"),
        ("partition", request.partition),
        ("account", request.account),
        ("qos", request.qos),
        ("constraint", request.constraint),
        ("exclude", request.exclude),
        ("nodelist", request.nodelist),
        ("reservation", request.reservation),
    ]
    yield "--requeue"
    for name, value in options:
        if value is not None:
            yield f"--{name}={sbatch_word(str(value))}"
    for name, value in request.additional_parameters:
        yield f"--{name}" if value is None else f"--{name}={sbatch_word(value)}"


def _check_path(what: str, path: str, hint: str) -> None:
    assert path.startswith("/"), f"{what}: {path} is not absolute"
    if problem := text_problem(path):
        raise UsageError(f"the path of {what} {problem}", hint)


# Slurm signals this shell, and the supervisor as well or not, so the shell passes TERM and USR2 on;
# but only once the supervisor has said with USR1 that it listens, since before that they would kill
# it. The shell polls: in a blocking `wait` bash loses one of two signals that come close together,
# and sometimes the child's exit code.
_TRAPS = """\
# Signals: kept until the supervisor says with USR1 that it listens, then passed on.
vitra_pid= vitra_ready= vitra_pending=() vitra_rc=1
vitra_pass_on() {
  [ "$vitra_ready" ] && [ "$vitra_pid" ] || return 0
  for vitra_signal in "${vitra_pending[@]}"; do kill -"$vitra_signal" "$vitra_pid" 2>/dev/null; done
  vitra_pending=()
}
trap 'vitra_pending+=(TERM); vitra_pass_on' TERM
trap 'vitra_pending+=(USR2); vitra_pass_on' USR2
trap 'vitra_ready=1; vitra_pass_on' USR1
export PYTHONUNBUFFERED=1
"""

# A supervisor that was killed outright (137) has judged nothing and requeued nothing. Its job is
# requeued here, at most `vitra_budget` times, and never one that was cancelled: requeueing would
# revive it. After scancel its state is no longer RUNNING; `vitra cancel` leaves a marker, which is
# looked at again after the requeue because it may have come in between. A person's `vitra resume`
# is a new job and begins a new count.
_SUPERVISE = """\
for vitra_try in 1 2 3; do
  "${vitra_command[@]}" &
  vitra_pid=$!
  vitra_pass_on
  while kill -0 "$vitra_pid" 2>/dev/null; do sleep 0.3; done
  wait "$vitra_pid"
  vitra_rc=$?
  # Killed by an early signal that we have kept as well: start it again, it gets the signal later.
  [ -z "$vitra_ready" ] && [ "${#vitra_pending[@]}" -gt 0 ] && [ "$vitra_rc" -gt 128 ] || break
  vitra_pid=
done
vitra_ready=

# The guard: a supervisor that was killed outright could not requeue the job.
if [ "$vitra_rc" = 137 ] && [ "$SLURM_JOB_ID" ] && [ ! -e "$vitra_run_dir/CANCEL" ] &&
  printf '%(%s)T %s\\n' -1 "$SLURM_JOB_ID" >>"$vitra_run_dir/guard"; then
  vitra_kills=$(grep -c " $SLURM_JOB_ID\\$" "$vitra_run_dir/guard")
  if [ "$vitra_kills" -gt "$vitra_budget" ]; then
    echo "vitra: the supervisor was killed $vitra_kills times in this job: not requeued again" >&2
  else
    echo "vitra: the supervisor was killed: requeue $vitra_kills of $vitra_budget" >&2
    for vitra_try in 1 2 3 4 5; do
      scontrol -o show job "$SLURM_JOB_ID" | grep -q ' JobState=RUNNING ' &&
        scontrol requeue "$SLURM_JOB_ID" && break
      sleep 1
    done
    [ ! -e "$vitra_run_dir/CANCEL" ] || scancel "$SLURM_JOB_ID"
  fi
fi
exit "$vitra_rc\""""
