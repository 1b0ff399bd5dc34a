"""The command line: parses, calls, prints. No logic, and nothing heavy imported before its time.

Annotations are evaluated as they stand, once: as text, typer would compile each at every start.
"""

import atexit
import errno
import gc
import json
import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from launcher.complete import complete_override, complete_run, complete_template
from launcher.help import HelpfulCommand, HelpfulGroup

if TYPE_CHECKING:
    from launcher.outcomes import Ending
    from trainer.spec.plan import Plan
    from trainer.spec.rundir import RunDir

app = typer.Typer(
    name="vitra",
    cls=HelpfulGroup,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

SpecPath = Annotated[
    Path, typer.Argument(metavar="SPEC", help="The run spec, a YAML file.", show_default=False)
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN",
        help="A run's directory, id, name, or the beginning of its id.",
        autocompletion=complete_run,
    ),
]
Place = Annotated[
    str,
    typer.Argument(
        metavar="RUN|URI", help="A run, or a checkpoint place.", autocompletion=complete_run
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "-o",
        "--override",
        metavar="KEY=VALUE",
        help="Override a key of the spec; may be repeated.",
        autocompletion=complete_override,
    ),
]
RunRoot = Annotated[
    str | None,
    typer.Option(
        "--run-root", metavar="DIR", help="Where runs live (default: $VITRA_RUN_ROOT, or ./runs)."
    ),
]
ProfileName = Annotated[
    str | None,
    typer.Option(
        "--profile", metavar="NAME", help="Take what the spec leaves out from this profile."
    ),
]
Wait = Annotated[
    bool,
    typer.Option("--wait", help="Follow it to the end, as --local does; Ctrl-C only stops that."),
]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on stdout, for scripts.")
]


def main() -> NoReturn:
    """The `vitra` command. Prints an error as one line and exits with its class's code."""
    from trainer.spec.errors import VitraError

    # What a start makes stays, so that looking through it for garbage again and again, and once
    # more at the end, is in vain: a tenth of the time of a command that only shows something.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    _leave_out_all_but(sys.argv[1:2])
    try:
        app()
    except VitraError as err:
        _say(str(err))
        sys.exit(err.exit_code)
    except Exception as err:  # noqa: BLE001 - the last line of defence: a log for us, a line for the user
        sys.exit(_unexpected(err))
    sys.exit(0)


def _leave_out_all_but(asked: list[str]) -> None:
    """Typer works out the parameters of every command, whichever is asked for."""
    commands = app.registered_commands
    if named := [c for c in commands if c.callback and c.callback.__name__ in asked]:
        app.registered_commands = named


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        _print_lines([f"vitra {version('vitra-launcher')}"])
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which it is.")
    ] = False,
) -> None:
    """Submit a multi-node training run once, and it finishes."""
    del version


def _leave(number: int, _frame: FrameType | None) -> NoReturn:
    """Until a supervisor takes the signals over: end, and undo on the way what was half done."""
    sys.exit(128 + number)


@app.command(cls=HelpfulCommand)
def submit(
    spec: SpecPath,
    override: Overrides = None,
    profile: ProfileName = None,
    run_root: RunRoot = None,
    local: Annotated[
        bool, typer.Option("--local", help="Run it on this machine, to the end.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the plan and what would be started; touch nothing."),
    ] = False,
    wait: Wait = False,
    json_: Json = False,
) -> None:
    """Check a spec, plan it exactly, and submit it to Slurm."""
    from datetime import datetime

    from launcher.container import refuse_container_here
    from launcher.drafting import draft, script

    drafted = draft(spec, override or [], run_root=run_root, environ=os.environ, profile=profile)
    if local:
        refuse_container_here(drafted.plan.spec)
    if dry_run:
        _show_dry_run(drafted.plan, None if local else script(drafted), as_json=json_)
        return

    from launcher.lock import RunLock
    from launcher.slurm import Slurm
    from launcher.submission import submit_slurm
    from launcher.submit import submit_local

    now = datetime.now().astimezone()
    if not local:
        run_dir, job_id = submit_slurm(
            drafted, Slurm(os.environ), environ=os.environ, say=_say, now=now
        )
        _announce_job(run_dir, job_id, wait=wait, as_json=json_)
        return
    run_dir = submit_local(drafted, environ=os.environ, say=_say, now=now)
    with RunLock(run_dir.lock):
        _announce(run_dir, as_json=json_)
        _supervise(run_dir)


@app.command(cls=HelpfulCommand)
def plan(
    spec: SpecPath,
    override: Overrides = None,
    profile: ProfileName = None,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """Show the plan alone: world size, batch, steps."""
    from launcher.drafting import draft
    from launcher.planner import public_view
    from launcher.show import plan_lines, profile_lines

    drafted = draft(spec, override or [], run_root=run_root, environ=os.environ, profile=profile)
    if json_:
        _print_json({**public_view(drafted.plan), "origins": dict(drafted.loaded.origins)})
    else:
        _print_folded([*plan_lines(drafted.plan), *profile_lines(drafted.loaded)])


@app.command(cls=HelpfulCommand)
def resume(
    run: RunName,
    override: Overrides = None,
    run_root: RunRoot = None,
    local: Annotated[bool, typer.Option("--local", help="Continue it on this machine.")] = False,
    slurm: Annotated[bool, typer.Option("--slurm", help="Continue it on Slurm.")] = False,
    allow_change: Annotated[
        bool, typer.Option("--allow-change", help="Allow overrides that alter what was trained.")
    ] = False,
    wait: Wait = False,
    json_: Json = False,
) -> None:
    """Continue a run from its newest complete checkpoint, where it ran before."""
    from launcher.lock import RunLock
    from launcher.registry import read_record
    from launcher.slurm import Slurm
    from launcher.standing import scheduler_of
    from launcher.submission import resume_local, resume_slurm
    from trainer.spec.errors import UsageError
    from trainer.spec.rundir import read_lines

    if local and slurm:
        raise UsageError("--local and --slurm exclude each other")
    run_dir = _find(run, run_root)
    before = scheduler_of(read_record(run_dir), list(read_lines(run_dir.events)))
    changes, commands = override or [], Slurm(os.environ)
    if slurm or (before == "slurm" and not local):
        job_id = resume_slurm(
            run_dir, changes, commands, allow_change=allow_change, environ=os.environ, say=_say
        )
        _announce_job(run_dir, job_id, wait=wait, as_json=json_)
        return
    # Held from before the first look, so that of two resumes at once one changes nothing.
    with RunLock(run_dir.lock):
        resumed = resume_local(
            run_dir, changes, commands, allow_change=allow_change, environ=os.environ, say=_say
        )
        _announce(run_dir, as_json=json_)
        if resumed is not None:
            _supervise(run_dir)


@app.command(cls=HelpfulCommand)
def watch(
    once: Annotated[
        bool, typer.Option("--once", help="Look once and end, as for cron; else every so often.")
    ] = False,
    interval_s: Annotated[
        float, typer.Option("--interval", min=1, metavar="SECONDS", help="How often to look.")
    ] = 60.0,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """Go on with every run under the run root whose Slurm job is gone though it is not over."""
    import time

    from launcher import watch as watching
    from launcher.registry import choose_run_root
    from launcher.slurm import Slurm
    from trainer.spec.errors import UsageError

    if json_ and not once:
        raise UsageError("--json prints one document", "add --once")
    root = choose_run_root(run_root, None, os.environ)
    slurm = Slurm(os.environ)
    while True:
        looks = watching.watch(root, slurm, environ=os.environ, say=_say)
        if json_:
            _print_json(watching.watch_facts(root, looks))
        elif lines := watching.watch_lines(looks):
            _print_folded(lines)
        if once:
            sys.exit(next((look.exit_code for look in looks if look.exit_code), 0))
        time.sleep(interval_s)


@app.command(cls=HelpfulCommand)
def status(run: RunName, run_root: RunRoot = None, json_: Json = False) -> None:
    """Show one run in full: state, attempts and their verdicts, newest checkpoint."""
    from launcher.registry import read_record
    from launcher.show import loss_lines, status_lines
    from launcher.slurm import Slurm
    from launcher.standing import JobBook, standing
    from launcher.status import run_status

    run_dir = _find(run, run_root)
    book = JobBook(Slurm(os.environ), [run_dir])
    facts = run_status(run_dir, standing(run_dir, read_record(run_dir), book))
    if json_:
        _print_json(facts)
    else:
        _print_folded([*status_lines(facts), *loss_lines(run_dir, width=_plot_width())])


@app.command(cls=HelpfulCommand)
def doctor(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="[SPEC]", help="What is to run; looked at as well."),
    ] = None,
    override: Overrides = None,
    profile: ProfileName = None,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """Is this machine, its cluster and its storage ready: every finding with its fix."""
    from launcher import doctor as examination
    from launcher.drafting import draft
    from launcher.registry import choose_run_root
    from launcher.slurm import Slurm

    drafted = (
        None
        if spec is None
        else draft(spec, override or [], run_root=run_root, environ=os.environ, profile=profile)
    )
    root = choose_run_root(run_root, None, os.environ) if drafted is None else drafted.run_root
    findings: list[examination.Finding] = []
    for finding in examination.examine(drafted, root, Slurm(os.environ), os.environ):
        findings.append(finding)
        if not json_:
            _print_folded(examination.finding_lines(finding))
    if json_:
        _print_json(examination.doctor_facts(findings))
    sys.exit(examination.first_exit_code(findings))


@app.command(cls=HelpfulCommand)
def ps(
    all_: Annotated[
        bool, typer.Option("--all", "-a", help="All runs, not only the newest 20.")
    ] = False,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """List the runs under the run root, newest first."""
    from launcher.ps import list_runs, run_lines
    from launcher.registry import choose_run_root
    from launcher.slurm import Slurm

    root = choose_run_root(run_root, None, os.environ)
    facts = list_runs(root, Slurm(os.environ), limit=None if all_ else 20)
    if json_:
        _print_json(facts)
        return
    if not facts["runs"]:
        _say(f"no runs under {root}; --run-root names another root")
        return
    _print_folded(run_lines(facts, _terminal_width()))
    if facts["more"]:
        _say("older runs: --all")


@app.command(cls=HelpfulCommand)
def logs(
    run: RunName,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Go on with what comes, until the run is over.")
    ] = False,
    rank: Annotated[
        list[int] | None,
        typer.Option("--rank", min=0, metavar="N", help="Only this rank; may be repeated."),
    ] = None,
    attempt: Annotated[
        list[int] | None,
        typer.Option("--attempt", min=1, metavar="N", help="Only this attempt; may be repeated."),
    ] = None,
    supervisor: Annotated[
        bool, typer.Option("--supervisor", help="Also what the supervisor noted.")
    ] = False,
    run_root: RunRoot = None,
) -> None:
    """Print what the ranks have printed, each line after its attempt and rank."""
    from launcher import logs as log_files
    from launcher.registry import read_plan, read_record
    from launcher.slurm import Slurm
    from launcher.standing import Over

    run_dir = _find(run, run_root)
    read_record(run_dir)
    selection = log_files.Selection(frozenset(rank or ()), frozenset(attempt or ()), supervisor)
    log_files.check_selection(
        run_dir, selection, world_size=read_plan(run_dir).world_size if follow else None
    )
    over = Over(run_dir, Slurm(os.environ))
    if follow and not over() and not over.alive:
        _say("nobody supervises this run at the moment: waiting for a resume (Ctrl-C leaves)")
    colour = log_files.in_colour(sys.stdout.buffer, os.environ)
    printer = log_files.Printer(sys.stdout.buffer, colour=colour)
    lines = log_files.log_lines(
        run_dir,
        selection,
        is_over=lambda: not follow or over(),
        wait=lambda: log_files.wait_for_more(sys.stdout.buffer, log_files.POLL_S),
    )
    with _until_nobody_listens():
        for line in lines:
            printer(line)
        sys.stdout.flush()


@app.command(cls=HelpfulCommand)
def cancel(
    run: RunName,
    wait_s: Annotated[
        float, typer.Option("--wait", min=0, metavar="SECONDS", help="Wait so long for its end.")
    ] = 60.0,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """Stop a run for good; it saves a checkpoint first. Only `vitra resume` starts it again."""
    from launcher.cancel import cancel_lines, cancel_run
    from launcher.registry import as_argument
    from launcher.slurm import Slurm

    run_dir = _find(run, run_root)
    facts = cancel_run(run_dir, Slurm(os.environ), wait_s=wait_s, say=_say)
    if json_:
        _print_json(facts)
    else:
        _print_folded(cancel_lines(facts, as_argument(run_dir, os.environ)))


@app.command(cls=HelpfulCommand)
def checkpoints(
    place: Place,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read every byte against its digest.")
    ] = False,
    prune: Annotated[
        bool, typer.Option("--prune", help="Delete those that the spec does not keep.")
    ] = False,
    keep_last: Annotated[
        int | None,
        typer.Option("--keep-last", metavar="N", help="With --prune: keep the newest N instead."),
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(
            "--keep-every", metavar="N", help="With --prune: keep multiples of N instead."
        ),
    ] = None,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """List complete and incomplete checkpoints."""
    from launcher.checkpoints import list_checkpoints, prune_checkpoints, prune_lines
    from launcher.registry import choose_run_root
    from launcher.show import checkpoint_lines
    from trainer.spec.errors import UsageError

    if not prune and (keep_last is not None or keep_every is not None):
        raise UsageError("--keep-last and --keep-every say what --prune keeps", "add --prune")
    root = choose_run_root(run_root, None, os.environ)
    pruned = (
        prune_checkpoints(place, root, keep_last=keep_last, keep_every=keep_every)
        if prune
        else None
    )
    facts = list_checkpoints(place, root, verify=verify)
    if json_:
        _print_json(facts if pruned is None else {**facts, "pruned": pruned})
    else:
        _print_folded([*(prune_lines(pruned) if pruned else []), *checkpoint_lines(facts)])
    if facts["damaged"]:
        sys.exit(6)


@app.command(cls=HelpfulCommand)
def export(
    place: Place,
    to: Annotated[
        str, typer.Option("--to", metavar="FILE", help="The file to write.", show_default=False)
    ],
    step: Annotated[
        int | None,
        typer.Option(
            "--step", metavar="N", help="The checkpoint of this step (default: the newest)."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    run_root: RunRoot = None,
    json_: Json = False,
) -> None:
    """Write a checkpoint's weights as one safetensors file, with nothing of the run in it."""
    from launcher.export import export_lines, export_weights
    from launcher.registry import choose_run_root

    root = choose_run_root(run_root, None, os.environ)
    facts = export_weights(place, root, to, step=step, force=force, environ=os.environ, say=_say)
    if json_:
        _print_json(facts)
    else:
        _print_lines(export_lines(facts))


@app.command(cls=HelpfulCommand)
def init(
    path: Annotated[
        str,
        typer.Argument(metavar="PATH", help="The file to make; - prints it.", show_default=False),
    ] = "spec.yaml",
    template: Annotated[
        str,
        typer.Option(
            "--template",
            "-t",
            metavar="NAME",
            help="What to start from; --list says which there are.",
            autocompletion=complete_template,
        ),
    ] = "quickstart",
    list_: Annotated[bool, typer.Option("--list", help="Say which templates there are.")] = False,
    json_: Json = False,
) -> None:
    """Write a commented spec to start from."""
    import shlex

    from launcher import templates

    if list_:
        found = {name: templates.about(name) for name in templates.template_names()}
        if json_:
            _print_json({"templates": [{"name": n, "about": a} for n, a in found.items()]})
        else:
            _print_folded([f"{name:<20}  {text}" for name, text in found.items()])
    elif path == "-":
        _print_lines(templates.template(template, "spec.yaml").splitlines())
    else:
        written = templates.write_template(template, path)
        if json_:
            _print_json({"template": template, "path": str(written)})
        else:
            _print_lines(
                [f"{written}: made from {template}", f"next: vitra plan {shlex.quote(path)}"]
            )


@app.command(cls=HelpfulCommand)
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print every key as a document to read instead.")
    ] = False,
) -> None:
    """Print the JSON Schema of a spec, for editors.

    Write it to a file once: vitra schema > vitra.schema.json

    Then begin a spec with the line: # yaml-language-server: $schema=vitra.schema.json

    Editors with the YAML language server complete, explain and check it as you type.
    """
    if markdown:
        from launcher.reference import spec_reference

        _print_lines(spec_reference().splitlines())
        return
    from launcher.schema import run_spec_schema

    _print_json(run_spec_schema())


def _find(run: str, run_root: str | None) -> "RunDir":
    from launcher.registry import choose_run_root, find_run

    return find_run(run, choose_run_root(run_root, None, os.environ))


def _show_dry_run(planned: "Plan", script: str | None, *, as_json: bool) -> None:
    from launcher.planner import public_view
    from launcher.show import local_lines, plan_lines

    if as_json:
        _print_json({"run_id": planned.run_id, **public_view(planned), "sbatch_script": script})
    elif script is None:
        _print_lines([*plan_lines(planned), "", *local_lines(planned)])
    else:
        _print_lines([*plan_lines(planned), "", *script.splitlines()])


def _announce(run_dir: "RunDir", *, as_json: bool) -> None:
    if as_json:
        _print_json({"run_id": run_dir.path.name, "run_dir": str(run_dir.path), "job_id": None})
    else:
        _say(f"run {run_dir.path.name} in {run_dir.path}")


def _announce_job(run_dir: "RunDir", job_id: str | None, *, wait: bool, as_json: bool) -> None:
    """Say which job a run is, or None: that nothing is left to do; and with `wait` follow it."""
    from launcher.registry import as_argument
    from launcher.wording import next_lines

    run_id, run = run_dir.path.name, as_argument(run_dir, os.environ)
    if as_json:
        _print_json({"run_id": run_id, "run_dir": str(run_dir.path), "job_id": job_id})
    elif job_id is not None:
        _print_lines(
            [
                f"run {run_id} in {run_dir.path}",
                f"job {job_id}",
                *next_lines(
                    (f"vitra status {run}", "where it stands, and why it waits"),
                    (f"vitra logs {run} -f", "what its ranks print, through every restart"),
                    (f"vitra cancel {run}", "saves first, and stops it for good"),
                ),
            ]
        )
    if job_id is not None and wait:
        _follow(run_dir, job_id)


def _follow(run_dir: "RunDir", job_id: str) -> NoReturn:
    """Show how a run on Slurm goes, and exit with what came of it."""
    from launcher.follow import exit_code, follow_run
    from launcher.progress import follow
    from launcher.registry import as_argument
    from launcher.show import ending_lines
    from launcher.slurm import Slurm

    run = as_argument(run_dir, os.environ)
    progress = follow(run_dir)
    try:
        ending = follow_run(run_dir, Slurm(os.environ), progress)
    except SystemExit:
        progress.close()
        _say(f"job {job_id} goes on; `vitra logs {run} -f` follows, `vitra cancel {run}` stops it")
        raise
    progress.close()
    for line in ending_lines(run_dir, ending, run):
        _say(line)
    sys.exit(exit_code(ending))


def _supervise(run_dir: "RunDir") -> NoReturn:
    """Run here to the end, and exit with what came of it. The caller holds the run's lock."""
    from launcher.job import Supervisor
    from launcher.progress import follow
    from launcher.registry import as_argument, read_record
    from launcher.schedulers.local import LocalLauncher, Terminal
    from launcher.show import ending_lines

    launcher = LocalLauncher(os.environ, Path(read_record(run_dir).working_dir))
    progress = follow(run_dir)
    try:
        ending = Supervisor(run_dir, launcher, progress, Terminal()).run()
    finally:
        progress.close()
    for line in ending_lines(run_dir, ending, as_argument(run_dir, os.environ)):
        _say(line)
    sys.exit(_exit_code(ending))


def _exit_code(ending: "Ending") -> int:
    from trainer.spec.errors import CheckpointError
    from trainer.spec.outcome import RunState

    if ending.state is RunState.COMPLETED:
        return 0
    if ending.state is RunState.CANCELLED and ending.signal is not None:
        return 128 + ending.signal
    return CheckpointError.exit_code if ending.exit_code == CheckpointError.exit_code else 5


@contextmanager
def _until_nobody_listens() -> Generator[None]:
    """End quietly where whoever reads stdout has gone: `| head` has ended, or the terminal."""
    try:
        yield
    except OSError as err:
        if err.errno not in (errno.EPIPE, errno.EIO):
            raise
        # What is still held back would fail again when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    from launcher.progress import write

    write(sys.stderr, f"{text}\n")


def _print_json(document: dict[str, Any]) -> None:
    from launcher.progress import write

    write(sys.stdout, json.dumps(document, indent=1) + "\n")


def _terminal_width() -> int | None:
    """How many columns standard output has; None where it is no terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _plot_width() -> int:
    """How wide a plot on standard output may be; 0 where it is no terminal that can show one."""
    try:
        "▁█".encode(sys.stdout.encoding)
    except UnicodeEncodeError:
        return 0
    return min(_terminal_width() or 0, 100)


def _print_folded(lines: list[str]) -> None:
    """For people: on a terminal no word is torn at its edge."""
    from launcher.wording import folded

    _print_lines(folded(lines, _terminal_width()))


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
