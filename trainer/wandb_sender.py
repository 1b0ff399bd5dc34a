"""`python -P -m trainer.wandb_sender RUN_DIR ATTEMPT`: sends a run's metrics to Weights & Biases.

A child of the primary rank, which it dies with. It reads metrics.jsonl, where every step stands
that counts, and sends those that were not sent yet: each step once over the life of the run,
however often that is killed. What was sent is not a matter of belief: online the server says which
step it has last; offline the files say it that wandb wrote, and `wandb/sent.json` remembers it for
when those have been cleaned away.

The rank writes one line to standard input, `<exit code> <seconds>`, when the attempt ends and this
process has so long to finish. Standard output carries one line at most: what went wrong. Then the
rank may start another; each begins with what was really sent.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from trainer.metrics import tracker_metrics
from trainer.parent import die_with, parent_pid
from trainer.spec.outcome import EXIT_SAVED
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, Tail, write_atomic
from trainer.spec.safety import looks_secret
from trainer.wandb_journal import Journal

#: Exit codes: trying again cannot help; it can; the attempt's end left no more time.
EXIT_GAVE_UP = 3
EXIT_FAILED = 4
EXIT_LATE = 5

_STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP})
_POLL_S = 1.0
_REMEMBER_EVERY_S = 5.0
#: Sending must not take the processor from training where that uses all of it.
_NICENESS = 10
_LONGEST_REASON = 300
_WITHHELD = "(withheld)"


class GiveUp(Exception):
    """Trying again cannot help; the text says why."""


class Rank:
    """The rank that started this process, at the other ends of standard input and output."""

    def __init__(self) -> None:
        # wandb, and what it starts, shall neither read the orders nor write among the news.
        self._orders, self._news = os.dup(0), os.dup(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        self._lock = threading.Lock()
        self._warned = False
        self.exit_code = 0
        self.ending = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def warn(self, reason: str) -> None:
        """Tell the rank what went wrong; only the first time, the rest is in the log."""
        line = " ".join(reason.split())[:_LONGEST_REASON]
        sys.stderr.write(f"{line}\n")
        with self._lock:
            if not self._warned:
                self._warned = True
                os.write(self._news, f"{line}\n".encode())

    def _listen(self) -> None:
        with os.fdopen(self._orders) as orders:
            line = orders.readline()
        if not line:  # the rank is gone, and with it the reason to be here
            os._exit(1)
        code, within_s = line.split()
        self.exit_code = int(code)
        self.ending.set()
        # Whatever the main thread is stuck in, the rank is not to wait for it any longer.
        time.sleep(float(within_s))
        # An attempt that was stopped or failed has a successor, or a resume, that sends the rest.
        if self.exit_code == 0:
            self.warn("not everything was sent in the time left at the end; metrics.jsonl has it")
        leave(EXIT_LATE)


class Sender:
    """Sends the metrics of one run, from the beginning of one attempt to its end."""

    def __init__(self, run_dir: RunDir, attempt: int, rank: Rank) -> None:
        plan = Plan.read(run_dir.attempt(attempt).plan)
        assert plan.spec.tracking.wandb is not None, "the rank has looked"
        self._plan = plan
        self._wanted = plan.spec.tracking.wandb
        self._run_dir = run_dir
        self._attempt = attempt
        self._rank = rank
        self._metrics = Tail(run_dir.metrics)
        self._directory = run_dir.path / "wandb"
        self._memory = self._directory / "sent.json"

    def run(self) -> None:
        """Send until the attempt has ended and everything is sent.

        Raises:
            GiveUp: it cannot be sent.
        """
        try:
            import wandb
        except Exception as err:
            hint = "; pip install wandb" if isinstance(err, ImportError) else ""
            raise GiveUp(f"cannot be imported: {type(err).__name__}: {err}{hint}") from err

        remembered = self._remembered()
        try:
            self._directory.mkdir(mode=0o750, exist_ok=True)
            # Where it cannot write, wandb would go elsewhere without a word to us.
            self._remember(remembered)
        except OSError as err:
            raise GiveUp(f"cannot write to {self._directory}: {err.strerror}") from err

        run = self._connect(wandb)
        sent = remembered
        if self._wanted.mode == "online":
            # The server's word counts, whatever was handed over: it may not have arrived.
            sent = int(run.starting_step) - 1 if run.resumed else 0
        journal = Journal(Path(run.dir).parent / f"run-{self._plan.run_id}.wandb")
        looked_at = time.monotonic()
        while True:
            # Asked before looking, so that nothing written until then can be missed.
            is_end = self._rank.ending.wait(_POLL_S)
            sent = self._send(run, sent)
            if is_end:
                break
            if time.monotonic() - looked_at >= _REMEMBER_EVERY_S:
                looked_at = time.monotonic()
                remembered = self._look(journal, remembered)
                if max(self._run_dir.attempt_numbers(), default=0) > self._attempt:
                    raise GiveUp("a newer attempt of the run has begun, and sends from now on")
        if self._rank.exit_code == EXIT_SAVED:
            run.mark_preempting()
        run.finish(exit_code=self._rank.exit_code)
        # finish() returns before the service has written the end of its file, and the service would
        # be ended with this process: wait for it.
        wandb.teardown()
        self._look(journal, remembered)

    def _connect(self, wandb: Any) -> Any:
        """Start the run, or go on with it."""
        online = self._wanted.mode == "online"
        try:
            return wandb.init(
                project=self._wanted.project,
                entity=self._wanted.entity,
                tags=list(self._wanted.tags),
                mode=self._wanted.mode,
                # Made once, at submit, and the run's for ever: so is its page.
                id=self._plan.run_id,
                name=self._plan.run_id,
                resume="allow" if online else None,
                dir=str(self._run_dir.path),
                config=tracker_config(self._plan),
                allow_val_change=True,
                settings=_settings(wandb),
            )
        except (wandb.errors.UsageError, wandb.errors.AuthenticationError) as err:
            raise GiveUp(str(err).rstrip(".")) from err

    def _send(self, run: Any, sent: int) -> int:
        """Send what metrics.jsonl has beyond step `sent`; returns the last step sent."""
        for record in self._metrics.records():
            # After a rewind steps are trained again: what was sent of them is bit for bit the same.
            if record["step"] > sent:
                sent = record["step"]
                run.log(
                    tracker_metrics(record, self._plan.global_batch_size), step=sent, commit=True
                )
        return sent

    def _remembered(self) -> int:
        """The highest step that wandb's files of this run hold, or have held.

        Those files are the earlier attempts', and what a kill has torn there is mended.
        """
        try:
            step = int(json.loads(self._memory.read_bytes())["step"])
        except (OSError, ValueError, KeyError, TypeError):
            step = 0
        run_id = self._plan.run_id
        for path in self._directory.glob(f"*run-*-{run_id}*/run-{run_id}.wandb"):
            journal = Journal(path)
            try:
                journal.mend()
            except OSError as err:  # what it holds can be sent by hand all the same
                sys.stderr.write(f"cannot mend {path}: {err.strerror}\n")
            step = max(step, journal.highest_step())
        return step

    def _look(self, journal: Journal, remembered: int) -> int:
        """Remember what has really been written since; returns the highest such step."""
        try:
            step = journal.highest_step()
            if step > remembered:
                journal.sync()
                self._remember(step)
                return step
        except OSError as err:
            self._rank.warn(f"cannot write to {self._directory}: {err.strerror}")
        return remembered

    def _remember(self, step: int) -> None:
        memory = {"run_id": self._plan.run_id, "step": step, "attempt": self._attempt}
        write_atomic(self._memory, json.dumps(memory).encode() + b"\n")


def tracker_config(plan: Plan) -> dict[str, Any]:
    """The run's configuration for the tracker: the spec and the plan's numbers.

    The spec holds no secrets, but it leaves the machine here: what a shell reads, variables and
    options for storage are left out altogether, and so is any value whose name looks secret.
    """
    spec = plan.spec.model_dump(mode="json")
    for section, key in (
        ("resources", "env"),
        ("resources", "setup"),
        ("checkpoint", "storage_options"),
    ):
        del spec[section][key]
    numbers = plan.model_dump(
        mode="json",
        include={
            "run_id",
            "spec_digest",
            "nodes",
            "world_size",
            "per_device_batch_size",
            "grad_accumulation_steps",
            "n_samples",
            "total_steps",
            "warmup_steps",
        },
    )
    return {**_without_secrets(spec), "plan": numbers}


def _without_secrets(value: Any) -> Any:
    match value:
        case dict():
            return {
                name: _WITHHELD if looks_secret(str(name)) else _without_secrets(inner)
                for name, inner in value.items()
            }
        case list():
            return [_without_secrets(inner) for inner in value]
        case _:
            return value


def _settings(wandb: Any) -> Any:
    """wandb's settings, as far as its version knows them."""
    wanted = {
        "console": "off",  # this process has nothing to show; the ranks' logs are the run's
        "disable_git": True,  # a remote's URL may have a token in it
        "disable_code": True,
        "x_stats_pid": os.getppid(),  # the rank is what system metrics are of interest for
    }
    known = wandb.Settings.model_fields
    return wandb.Settings(**{name: value for name, value in wanted.items() if name in known})


def leave(code: int) -> NoReturn:
    """End at once, with no hook of wandb's to wait for; its service ends when this process has."""
    sys.stderr.flush()
    os._exit(code)


def main(arguments: list[str]) -> NoReturn:
    """Send one attempt's metrics; the exit code is 0 once everything is sent."""
    # A stop is the ranks' business, but some schedulers tell every process of a job.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    die_with(parent_pid(os.environ))
    os.nice(_NICENESS)
    rank = Rank()
    path, attempt = arguments
    try:
        Sender(RunDir(Path(path)), int(attempt), rank).run()
    except GiveUp as err:
        rank.warn(f"{err}; training goes on without it")
        leave(EXIT_GAVE_UP)
    except BaseException as err:  # noqa: BLE001 - the rank is told, whatever it was
        traceback.print_exc()
        # wandb's service does not survive such a signal. It is no fault then, and not worth a word.
        if not _STOP_SIGNALS & signal.sigpending():
            rank.warn(f"{type(err).__name__}: {err}; training goes on, and it is tried again")
        leave(EXIT_FAILED)
    leave(0)


if __name__ == "__main__":
    main(sys.argv[1:])
