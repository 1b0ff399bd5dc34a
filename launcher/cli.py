"""The command line: parses, calls, prints. No logic, and nothing heavy imported before its time."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from launcher.job import Ending
    from trainer.spec.plan import Plan
    from trainer.spec.rundir import RunDir

app = typer.Typer(
    name="vitra",
    help="Submit a multi-node training run once, and it finishes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecPath = Annotated[
    Path, typer.Argument(metavar="SPEC", help="The run spec, a YAML file.", show_default=False)
]
RunName = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run's directory, id, name, or the beginning of its id."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--override", metavar="KEY=VALUE", help="Override a key of the spec; may be repeated."
    ),
]
RunRoot = Annotated[
    str | None,
    typer.Option(
        "--run-root", metavar="DIR", help="Where runs live.  [default: $VITRA_RUN_ROOT, or ./runs]"
    ),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, for scripts.")
]


def main() -> NoReturn:
    """The `vitra` command. Prints an error as one line and exits with its class's code."""
    from trainer.spec.errors import VitraError

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    try:
        app()
    except VitraError as err:
        _say(str(err))
        sys.exit(err.exit_code)
    except Exception as err:  # noqa: BLE001 - the last line of defence: a log for us, a line for the user
        sys.exit(_unexpected(err))
    sys.exit(0)


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Until a supervisor takes the signals over: end, and undo on the way what was half done."""
    sys.exit(128 + number)


@app.command()
def submit(
    spec: SpecPath,
    override: Overrides = None,
    run_root: RunRoot = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run it on this machine, to the end.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the plan and what would be started; touch nothing."),
    ] = False,
    json_: Json = False,
) -> None:
    """Check a spec, plan it exactly, and run it."""
    from datetime import datetime

    from launcher.lock import RunLock
    from launcher.submit import draft, script, submit_local
    from trainer.spec.errors import UsageError

    drafted = draft(spec, override or [], run_root=run_root, environ=os.environ)
    if dry_run:
        _show_dry_run(drafted.plan, None if local else script(drafted), as_json=json_)
        return
    if not local:
        raise UsageError(
            "submitting to Slurm is not yet part of this version",
            "add --local to run on this machine, or --dry-run to see the batch script",
        )
    run_dir = submit_local(drafted, environ=os.environ, say=_say, now=datetime.now().astimezone())
    with RunLock(run_dir.lock):
        _announce(run_dir, as_json=json_)
        _supervise(run_dir)


@app.command()
def plan(
    spec: SpecPath, override: Overrides = None, run_root: RunRoot = None, json_: Json = False
) -> None:
    """Show the plan alone: world size, batch, steps."""
    from launcher.planner import public_view
    from launcher.show import plan_lines
    from launcher.submit import draft

    drafted = draft(spec, override or [], run_root=run_root, environ=os.environ)
    if json_:
        _print_json(public_view(drafted.plan))
    else:
        _print_lines(plan_lines(drafted.plan))


@app.command()
def resume(
    run: RunName,
    override: Overrides = None,
    run_root: RunRoot = None,
    local: Annotated[bool, typer.Option("--local", help="Continue it on this machine.")] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Allow overrides that alter what was trained.")
    ] = False,
    json_: Json = False,
) -> None:
    """Continue a run from its newest complete checkpoint, where it ran before."""
    from launcher.lock import RunLock
    from launcher.registry import read_record
    from launcher.resume import prepare_resume
    from trainer.spec.errors import UsageError

    run_dir = _find(run, run_root)
    if not local and read_record(run_dir).scheduler != "local":
        raise UsageError("resuming on Slurm is not yet part of this version", "add --local")
    # Held from before the first look, so that of two resumes at once one changes nothing.
    with RunLock(run_dir.lock):
        planned = prepare_resume(
            run_dir, override or [], allow_change=allow_change, environ=os.environ, say=_say
        )
        _announce(run_dir, as_json=json_)
        if planned is not None:
            _supervise(run_dir)


@app.command()
def status(run: RunName, run_root: RunRoot = None, json_: Json = False) -> None:
    """Show one run in full: state, attempts and their verdicts, newest checkpoint."""
    from launcher.show import status_lines
    from launcher.status import run_status

    facts = run_status(_find(run, run_root))
    if json_:
        _print_json(facts)
    else:
        _print_lines(status_lines(facts))


@app.command()
def checkpoints(
    place: Annotated[str, typer.Argument(metavar="RUN|URI", help="A run, or a checkpoint place.")],
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte against its digest.")
    ] = False,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """List complete and incomplete checkpoints."""
    from launcher.checkpoints import list_checkpoints
    from launcher.registry import choose_run_root
    from launcher.show import checkpoint_lines

    facts = list_checkpoints(place, choose_run_root(run_root, None, os.environ), verify=verify)
    if json_:
        _print_json(facts)
    else:
        _print_lines(checkpoint_lines(facts))
    if facts["damaged"]:
        sys.exit(6)


def _find(run: str, run_root: str | None) -> RunDir:
    from launcher.registry import choose_run_root, find_run

    return find_run(run, choose_run_root(run_root, None, os.environ))


def _show_dry_run(planned: Plan, script: str | None, *, as_json: bool) -> None:
    from launcher.planner import public_view
    from launcher.show import local_lines, plan_lines

    if as_json:
        _print_json({"run_id": planned.run_id, **public_view(planned), "sbatch_script": script})
    elif script is None:
        _print_lines([*plan_lines(planned), "", *local_lines(planned)])
    else:
        _print_lines([*plan_lines(planned), "", *script.splitlines()])


def _announce(run_dir: RunDir, *, as_json: bool) -> None:
    if as_json:
        _print_json({"run_id": run_dir.path.name, "run_dir": str(run_dir.path), "job_id": None})
    else:
        _say(f"run {run_dir.path.name} in {run_dir.path}")


def _supervise(run_dir: RunDir) -> NoReturn:
    """Run here to the end, and exit with what came of it. The caller holds the run's lock."""
    from launcher.job import Supervisor
    from launcher.progress import follow
    from launcher.registry import as_argument, read_record
    from launcher.schedulers.local import LocalLauncher
    from launcher.show import ending_lines

    launcher = LocalLauncher(os.environ, Path(read_record(run_dir).working_dir))
    progress = follow(run_dir)
    try:
        ending = Supervisor(run_dir, launcher, progress).run()
    finally:
        progress.close()
    for line in ending_lines(run_dir, ending, as_argument(run_dir, os.environ)):
        _say(line)
    sys.exit(_exit_code(ending))


def _exit_code(ending: Ending) -> int:
    from trainer.spec.errors import CheckpointError
    from trainer.spec.outcome import RunState

    if ending.state is RunState.COMPLETED:
        return 0
    if ending.state is RunState.CANCELLED and ending.signal is not None:
        return 128 + ending.signal
    return CheckpointError.exit_code if ending.exit_code == CheckpointError.exit_code else 5


def _say(text: str) -> None:
    from launcher.progress import write

    write(sys.stderr, f"{text}\n")


def _print_json(document: dict[str, Any]) -> None:
    from launcher.progress import write

    write(sys.stdout, json.dumps(document, indent=1) + "\n")


def _print_lines(lines: list[str]) -> None:
    from launcher.progress import write

    write(sys.stdout, "\n".join(lines) + "\n")


def _unexpected(err: Exception) -> int:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile("w", prefix="vitra-", suffix=".log", delete=False) as file:
        traceback.print_exception(err, file=file)
    _say(f"unexpected {type(err).__name__}: {err}; the traceback is in {file.name}")
    return 1


if __name__ == "__main__":
    main()
