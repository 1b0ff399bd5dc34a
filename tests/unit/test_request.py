"""The submit request and its script: as text, as sbatch reads it, and as bash runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.load import load_spec
from launcher.planner import plan
from launcher.request import SubmitRequest, build_request, render, sbatch_word
from trainer.spec.errors import UsageError
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.run import RunSpec
from trainer.spec.safety import text_problem

GOLDEN = Path(__file__).parent.parent / "golden"
PYTHON = "/opt/vitra/bin/python"


def spec_of(**resources: object) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": "vla"},
            "data": {"kind": "synthetic"},
            "train": {"global_batch_size": 512, "max_steps": 10},
            "resources": resources,
        }
    )


def request_of(spec: RunSpec, run_root: str = "/runs", python: str = PYTHON) -> SubmitRequest:
    run_id = f"{spec.name}-DRYRUN"
    run_dir = f"{spec.run_root or run_root}/{run_id}"
    return build_request(plan(spec, run_id=run_id, run_dir=run_dir), python=python)


# --- the text


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_golden_script(path: Path) -> None:
    """Byte for byte. After a change that is meant: VITRA_UPDATE_GOLDEN=1, and read the diff."""
    found = render(request_of(load_spec(path, [], environ={}).spec, "/shared/runs"))
    golden = path.with_suffix(".sbatch")
    if os.environ.get("VITRA_UPDATE_GOLDEN") == "1":
        golden.write_bytes(found.encode())
    assert found.encode() == golden.read_bytes()


def test_every_golden_script_has_its_spec() -> None:
    assert {p.stem for p in GOLDEN.glob("*.sbatch")} == {p.stem for p in GOLDEN.glob("*.yaml")}


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.sbatch")), ids=lambda path: path.stem)
def test_golden_script_is_valid_bash(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize(
    ("resources", "flags"),
    [
        ({"gpus_per_node": 8}, ["--gpus-per-node=8"]),
        ({"gpus_per_node": "a100:4"}, ["--gpus-per-node=a100:4"]),
        ({"gpus_per_node": 8, "gpu_request": "gres"}, ["--gres=gpu:8"]),
        ({"gpus_per_node": "a100:4", "gpu_request": "gres"}, ["--gres=gpu:a100:4"]),
        ({"gpus_per_node": 8, "gpu_request": "none"}, []),
        ({"gpus_per_node": 0}, []),
        ({"gpus_per_node": 0, "gpu_request": "gres"}, []),
    ],
)
def test_gpus_are_asked_for_once_in_the_chosen_form(
    resources: dict[str, object], flags: list[str]
) -> None:
    words = sbatch_words(render(request_of(spec_of(**resources))))
    assert [word for word in words if "gpu" in word or "gres" in word] == flags


def test_what_is_not_set_is_not_asked_for() -> None:
    assert sbatch_words(render(request_of(spec_of()))) == [
        "--requeue",
        "--job-name=a",
        "--comment=vitra:a-DRYRUN",
        "--output=/runs/a-DRYRUN/batch-%j.log",
        "--open-mode=append",
        "--signal=B:USR2@120",
        "--time=1440",
        "--nodes=1",
        "--ntasks-per-node=1",
    ]


def test_cpus_and_memory() -> None:
    words = sbatch_words(render(request_of(spec_of(cpus_per_task=6, mem_gb=0))))
    assert {"--cpus-per-task=6", "--mem=0G"} <= set(words)


def test_an_elastic_run_asks_for_its_usable_counts() -> None:
    assert request_of(spec_of(nodes={"min": 3, "max": 9})).nodes == "4-8"
    assert request_of(spec_of(nodes={"min": 3, "max": 7})).nodes == "4"


@pytest.mark.parametrize("run_root", ["/a\\b", "/a\nb", "/a\x7fb"])
def test_directories_that_slurm_would_garble_are_refused(run_root: str) -> None:
    with pytest.raises(UsageError, match="run directory"):
        request_of(spec_of(), run_root)


def test_an_interpreter_with_a_line_break_is_refused() -> None:
    with pytest.raises(UsageError, match="Python interpreter"):
        request_of(spec_of(), python="/a\nb/python")


def test_a_request_is_a_value() -> None:
    request = request_of(spec_of())
    assert request == request_of(spec_of())
    with pytest.raises(ValidationError):
        request.nodes = "2"  # type: ignore[misc]


# --- as sbatch reads it


def sbatch_words(script: str) -> list[str]:
    """The options that sbatch finds in a script: a model of its own reader."""
    words: list[str] = []
    for line in script.split("\n"):
        if line.startswith("#SBATCH"):
            words += list(directive_words(line.removeprefix("#SBATCH")))
        elif line.strip() and not line.lstrip().startswith("#"):
            break  # the first command ends the directives
    return words


def directive_words(line: str) -> Iterator[str]:
    lowered = line.lower()
    for separator in ("hetjob", "packjob"):
        at = lowered.find(separator)
        if at >= 0:
            line = line[:at] + " " * len(separator) + line[at + len(separator) :]
    word: str | None = None
    quote = ""
    escaped = False
    for char in line:
        if escaped:
            word, escaped = (word or "") + char, False
        elif char == "\\":
            escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word = (word or "") + char
        elif char in "\"'":
            quote = char
        elif char == "#":
            break
        elif char in " \t\r\v\f":
            if word is not None:
                yield word
            word = None
        else:
            word = (word or "") + char
    assert not quote, f"unmatched quote: {line}"
    if word is not None:
        yield word


def log_name(pattern: str, job_id: int) -> str:
    """A model of how Slurm makes the name of a batch job's log."""
    if "\\" in pattern:
        return pattern.replace("\\", "")
    return "%".join(part.replace("%j", str(job_id)) for part in pattern.split("%%"))


# Pieces that mean something to a shell, to sbatch or to Slurm, and anything else.
text = (
    st.lists(
        st.one_of(
            st.sampled_from(
                ["hetjob", "PackJob", "#", '"', "'", "\\", " ", "%", "%j", "%%", "$HOME", "`id`"]
            ),
            st.text(max_size=6),
        ),
        min_size=1,
        max_size=8,
    )
    .map("".join)
    .filter(lambda value: value != "" and text_problem(value) is None)
)


@given(text)
@settings(max_examples=150, deadline=None)
def test_a_word_is_read_back_as_it_was(value: str) -> None:
    assert list(directive_words(f" --x={sbatch_word(value)} --y")) == [f"--x={value}", "--y"]


@given(text, text, text, text)
@settings(max_examples=50, deadline=None)
def test_sbatch_gets_the_values_of_the_spec(
    partition: str, nodelist: str, parameter: str, directory: str
) -> None:
    directory = directory.replace("\\", "/")
    spec = spec_of(
        partition=partition,
        nodelist=nodelist,
        additional_parameters={"license": parameter, "exclusive": True},
        setup=["#SBATCH --nodes=99"],
    )
    words = sbatch_words(render(request_of(spec, f"/r/{directory}")))
    assert words[-4:] == [
        f"--partition={partition}",
        f"--nodelist={nodelist}",
        f"--license={parameter}",
        "--exclusive",
    ]
    (output,) = [word for word in words if word.startswith("--output=")]
    assert log_name(output.removeprefix("--output="), 17) == f"/r/{directory}/a-DRYRUN/batch-17.log"
    assert [word for word in words if word.startswith("--nodes")] == ["--nodes=1"]


# --- as bash runs it

# Stands for the interpreter: records how it is started and which signals it gets, and behaves as
# `behaviour.json` beside it says.
STAND_IN = """\
import json, os, signal, sys, time

run_dir = sys.argv[-1]
here = os.path.dirname(sys.argv[0])
behaviour = json.load(open(os.path.join(here, "behaviour.json")))

def note(**record):
    with open(os.path.join(run_dir, "seen.jsonl"), "a") as file:
        file.write(json.dumps(record) + "\\n")

environ = {k.decode("latin-1"): v.decode("latin-1") for k, v in os.environb.items()}
note(start=[os.fsencode(a).decode("latin-1") for a in sys.argv], environ=environ, pid=os.getpid())
if behaviour.get("kill_self"):
    os.kill(os.getpid(), signal.SIGKILL)
end = time.monotonic() + 20
listen = os.path.join(here, "listen")
while behaviour.get("deaf") and not os.path.exists(listen) and time.monotonic() < end:
    time.sleep(0.01)
got = []
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, frame: got.append(signal.Signals(number).name))
note(listening=True)
os.kill(os.getppid(), signal.SIGUSR1)
end = time.monotonic() + 20
while len(set(got)) < behaviour.get("signals", 0) and time.monotonic() < end:
    time.sleep(0.01)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, signal.SIG_IGN)  # the supervisor does so too: one may come twice
note(signals=sorted(set(got)))
sys.exit(behaviour.get("code", 0))
"""


@dataclass
class Job:
    """A run directory, a stand-in for the interpreter, and stand-ins for Slurm's commands."""

    root: Path
    run_dir: Path
    python: Path
    environ: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def behave(self, **behaviour: object) -> None:
        (self.python.parent / "behaviour.json").write_text(json.dumps(behaviour))

    def let_supervisor_listen(self) -> None:
        """End the deafness of a supervisor that behaves deaf: it has no handlers until then."""
        (self.python.parent / "listen").touch()

    def command(self, name: str, body: str) -> None:
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)

    def start(self, spec: RunSpec | None = None, **environ: str) -> subprocess.Popen[bytes]:
        """Run the script of a spec as a batch job does: a file, its own session."""
        request = request_of(spec or spec_of(), str(self.run_dir.parent), str(self.python))
        assert request.run_dir == str(self.run_dir)
        script = self.root / "script"
        script.write_bytes(render(request).encode())
        process = subprocess.Popen(
            ["/bin/bash", str(script)],
            env=self.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, spec: RunSpec | None = None, **environ: str) -> tuple[int, bytes]:
        process = self.start(spec, **environ)
        output, _ = process.communicate(timeout=30)
        return process.returncode, output

    def seen(self, key: str) -> list[Any]:
        path = self.run_dir / "seen.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [record[key] for record in map(json.loads, lines) if key in record]

    def order(self) -> list[str]:
        lines = (self.run_dir / "seen.jsonl").read_text().splitlines()
        return [next(iter(json.loads(line))) for line in lines]

    def calls(self) -> list[str]:
        """What was asked of scontrol and scancel, but for looking."""
        path = self.root / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if " show " not in line]


def new_job(root: Path, run_root: Path) -> Job:
    run_dir = run_root / "a-DRYRUN"
    run_dir.mkdir(parents=True)
    (root / "bin").mkdir()
    python = root / "inter preter's" / "py$thon"
    python.parent.mkdir()
    python.write_text(f"#!{sys.executable} -IS\n{STAND_IN}")
    python.chmod(0o755)
    environ = {
        "PATH": f"{root / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": "17",
        "CALLS": str(root / "calls"),
    }
    job = Job(root, run_dir, python, environ)
    job.behave()
    job.command("sleep", "exec /bin/sleep 0.05")  # the script's pauses, shortened
    job.command("scancel", 'echo "scancel $*" >>"$CALLS"')
    job.command(
        "scontrol",
        'echo "scontrol $*" >>"$CALLS"\n'
        'case $* in *show*) echo "JobId=17 JobState=${STATE:-RUNNING} Restarts=0";; esac',
    )
    return job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    job = new_job(tmp_path, tmp_path / "runs")
    yield job
    for process in job.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "it did not happen within 20 s"
        time.sleep(0.01)


@pytest.mark.parametrize("code", [0, 1, 75, 93])
def test_the_exit_code_is_the_supervisors(job: Job, code: int) -> None:
    job.behave(code=code)
    assert job.run() == (code, b"")
    assert job.calls() == []


def test_text_arrives_byte_for_byte_and_runs_nothing(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    hostile = (
        f"""it's 50% %j "q" $HOME `touch {canary}` $(touch {canary}) \\n # !! täst 日本 * ~ ;&|<>"""
    )
    root = tmp_path / hostile.replace("/", "_").replace("\\", "_")
    job = new_job(tmp_path, root)
    env = {"A": hostile, "B": "", "C": " lead and trail ", "D": "-n", "E": "\\", "F": "'"}
    code, output = job.run(spec_of(env=env))
    assert (code, output) == (0, b"")
    (argv,), (environ,) = job.seen("start"), job.seen("environ")
    given = [argument.encode("latin-1") for argument in argv]
    assert given == [
        os.fsencode(argument)
        for argument in (str(job.python), "-P", "-m", "launcher.job", str(job.run_dir))
    ]
    assert {name: environ[name].encode("latin-1").decode() for name in env} == env
    assert not canary.exists()


@given(st.lists(text, min_size=1, max_size=8))
@settings(max_examples=15, deadline=None)
def test_bash_exports_what_the_spec_says(values: list[str]) -> None:
    env = {f"V{number}": value for number, value in enumerate(values)}
    script = render(request_of(spec_of(env=env, setup=["exec env -0"])))
    answer = subprocess.run(["/bin/bash", "-s"], input=script.encode(), stdout=-1, check=True)
    found = dict(item.split(b"=", 1) for item in answer.stdout.split(b"\0") if item)
    assert {name: found[name.encode()].decode() for name in env} == env


def test_what_the_supervisor_inherits(job: Job) -> None:
    stale = dict.fromkeys(LAUNCH_VARIABLES, "7")
    spec = spec_of(env={"PASSED": None, "OWN": "spec"}, setup=['export MADE="$OWN $PASSED"'])
    code, _ = job.run(spec, **stale, PASSED="submitter", OWN="submitter")
    (environ,) = job.seen("environ")
    assert code == 0
    assert not set(LAUNCH_VARIABLES) & set(environ)
    assert environ["PASSED"] == "submitter"
    assert environ["OWN"] == "spec"
    assert environ["MADE"] == "spec submitter"


@pytest.mark.parametrize("line", ["set -euo pipefail", "set -m", "IFS=TERM", "cd /"])
def test_setup_lines_cannot_disturb_what_follows(job: Job, line: str) -> None:
    job.behave(code=75, signals=2)
    process = job.start(spec_of(setup=[line]))
    until(lambda: job.seen("listening"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR2)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert job.seen("signals") == [["SIGTERM", "SIGUSR2"]]


def test_a_setup_line_that_fails_under_set_e_ends_the_job(job: Job) -> None:
    code, _ = job.run(spec_of(setup=["set -e", "false"]))
    assert code == 1
    assert not (job.run_dir / "seen.jsonl").exists()


def test_signals_before_the_supervisor_listens_are_kept_and_then_passed_on(job: Job) -> None:
    job.behave(code=75, signals=2, deaf=True)
    process = job.start()
    until(lambda: job.seen("start"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGUSR2)
    job.let_supervisor_listen()
    process.communicate(timeout=30)
    assert process.returncode == 75
    # Had one been passed on early, the deaf supervisor would have died and been started again.
    assert job.order() == ["start", "listening", "signals"]
    assert job.seen("signals") == [["SIGTERM", "SIGUSR2"]]


def test_signals_during_setup_are_kept_as_well(job: Job) -> None:
    job.behave(code=75, signals=1)
    process = job.start(spec_of(setup=[': >"$CALLS.setup"', "/bin/sleep 0.3"]))
    until((job.root / "calls.setup").exists)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert job.seen("signals") == [["SIGTERM"]]


def test_a_signal_to_the_whole_tree_that_kills_a_deaf_supervisor_is_not_lost(job: Job) -> None:
    job.behave(code=75, signals=1, deaf=True)
    process = job.start()
    until(lambda: job.seen("start"))
    os.killpg(process.pid, signal.SIGTERM)
    job.let_supervisor_listen()
    process.communicate(timeout=30)
    assert process.returncode == 75
    assert job.order() == ["start", "start", "listening", "signals"]
    assert job.seen("signals") == [["SIGTERM"]]


def test_a_killed_supervisor_is_requeued_within_its_budget(job: Job) -> None:
    job.behave(kill_self=True)
    for _ in range(2):
        code, output = job.run()
        assert code == 137
        assert b"vitra: the supervisor was killed" in output
    assert job.calls() == ["scontrol requeue 17"] * 2
    code, output = job.run()
    assert code == 137
    assert b"not requeued again" in output
    assert job.calls() == ["scontrol requeue 17"] * 2
    # Another job of the run (a resume) has its own count; 7 is not taken for 17.
    assert job.run(SLURM_JOB_ID="7")[0] == 137
    assert job.calls() == ["scontrol requeue 17"] * 2 + ["scontrol requeue 7"]


def test_shell_options_of_setup_lines_do_not_reach_the_guard(job: Job) -> None:
    job.behave(kill_self=True)
    assert job.run(spec_of(setup=["set -euo pipefail"]))[0] == 137
    assert job.calls() == ["scontrol requeue 17"]


def test_a_cancelled_run_is_not_revived(job: Job) -> None:
    job.behave(kill_self=True)
    (job.run_dir / "CANCEL").touch()
    assert job.run()[0] == 137
    assert job.calls() == []


def test_a_job_that_is_ending_is_not_revived(job: Job) -> None:
    job.behave(kill_self=True)
    assert job.run(STATE="COMPLETING")[0] == 137
    assert job.calls() == []


def test_a_cancel_that_comes_during_the_requeue_still_counts(job: Job) -> None:
    job.behave(kill_self=True)
    show = 'case $* in *show*) echo "x JobState=RUNNING x"; touch "$CANCEL";; esac'
    job.command("scontrol", f'echo "scontrol $*" >>"$CALLS"\n{show}')
    assert job.run(CANCEL=str(job.run_dir / "CANCEL"))[0] == 137
    assert job.calls() == ["scontrol requeue 17", "scancel 17"]
