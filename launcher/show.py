"""Facts as lines of text for people."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from launcher.load import LoadedSpec
from launcher.wording import clock_time, next_lines, size_text
from trainer.spec.plan import Plan
from trainer.spec.rundir import RunDir, read_lines

if TYPE_CHECKING:
    from launcher.outcomes import Ending


def plan_lines(plan: Plan) -> list[str]:
    """The plan of a run."""
    spec, resources = plan.spec, plan.spec.resources
    devices = f"{resources.gpu_count} GPUs per node" if resources.gpu_count else "on CPUs"
    total = (
        "decided by epochs, known at submit" if plan.total_steps is None else f"{plan.total_steps}"
    )
    warmup = "" if plan.warmup_steps is None else f", {plan.warmup_steps} of them warm-up"
    lines = [
        f"name          {spec.name}",
        f"strategy      {spec.train.strategy}",
        f"world size    {plan.nodes} nodes x {plan.tasks_per_node} processes = {plan.world_size}  "
        f"({devices})",
        f"global batch  {plan.per_device_batch_size} per device x {plan.world_size} x "
        f"{plan.grad_accumulation_steps} accumulation = {plan.global_batch_size}",
        f"steps         {total}{warmup}",
        f"time limit    {clock_time(plan.time_limit_min * 60)}",
        f"checkpoints   every {spec.checkpoint.save_interval} steps in {plan.checkpoint_uri}",
    ]
    if (container := plan.spec.resources.container) is not None:
        lines.append(f"container     {container.image} ({container.runtime})")
        lines += [f"  mount {mount}" for mount in container.mounts]
    lines += [
        f"  on {shape.nodes} nodes  {shape.per_device_batch_size} x {shape.world_size} x "
        f"{shape.grad_accumulation_steps} = {plan.global_batch_size}"
        for shape in plan.elastic
    ]
    return [*lines, *(f"note: {note}" for note in plan.notes)]


def profile_lines(loaded: LoadedSpec) -> list[str]:
    """Which values are those of a profile, and of which file of it."""
    lines: list[str] = []
    for profile in loaded.profiles:
        begins = f"{profile.source}:"
        keys = [key for key, where in loaded.origins.items() if where.startswith(begins)]
        used = ", ".join(keys) or "the spec says all of it otherwise"
        lines.append(f"profile       {profile.source}: {used}")
    return lines


def local_lines(plan: Plan) -> list[str]:
    """What --local would start."""
    return [
        f"{plan.world_size} processes on this machine, {plan.threads_per_rank} threads each:",
        *(
            f"  rank {rank}: python -P -m trainer {plan.run_dir}"
            for rank in range(min(plan.world_size, 8))
        ),
        *([f"  ... and {plan.world_size - 8} more"] if plan.world_size > 8 else []),
    ]


def status_lines(facts: dict[str, Any]) -> list[str]:
    """`vitra status`."""
    total = "?" if facts["total_steps"] is None else facts["total_steps"]
    saved = (
        "none" if facts["last_checkpoint_step"] is None else f"step {facts['last_checkpoint_step']}"
    )
    lines = [
        f"run         {facts['run_id']}",
        f"state       {facts['state']}: {facts['reason']}",
        f"step        {facts['step']} of {total}{_to_go(facts['eta_s'])}",
        f"checkpoint  {saved}",
        *_goodput_lines(facts["goodput"]),
        *_budget_lines(facts["budgets"]),
        f"directory   {facts['run_dir']}",
    ]
    if facts["job_id"] is not None:
        lines.insert(2, f"job         {facts['job_id']}  {facts['job_state'] or 'gone'}")
    for attempt in facts["attempts"]:
        steps = (
            "no step finished"
            if attempt["first_step"] is None
            else f"steps {attempt['first_step']}-{attempt['last_step']}"
        )
        verdict = attempt["verdict"] or "running"
        label = f"attempt {attempt['attempt']}"
        lines.append(f"{label:<10}  {verdict}, {steps}: {attempt['reason']}")
    return lines


def loss_lines(run_dir: RunDir, *, width: int) -> list[str]:
    """How the loss has fallen, as a line of at most `width` characters; 0: in numbers alone."""
    from launcher.pace import trend

    losses = [float(record["loss"]) for record in read_lines(run_dir.metrics)]
    if len(losses) < 2:
        return []
    first, last = f"{losses[0]:.4f}", f"{losses[-1]:.4f}"
    drawn = trend(losses, width - len("loss        ") - len(first) - len(last) - 2)
    return [f"loss        {first} {drawn or '->'} {last}"]


def _to_go(eta_s: float | None) -> str:
    return "" if eta_s is None else f", about {clock_time(eta_s)} to go"


#: The parts of a run's time as people call them.
_PARTS = {
    "training_s": "training",
    "saving_s": "saving",
    "restoring_s": "restoring",
    "starting_s": "starting",
    "queued_s": "queued",
    "lost_s": "lost",
    "other_s": "other",
}


def _goodput_lines(goodput: dict[str, float | None] | None) -> list[str]:
    """What share of its time on nodes a run trained for good, and where the rest went."""
    if goodput is None or goodput["ratio"] is None:
        return []
    parts = [(goodput[name] or 0.0, word) for name, word in _PARTS.items()]
    went = ", ".join(f"{word} {clock_time(seconds)}" for seconds, word in parts if seconds >= 0.5)
    return [f"goodput     {goodput['ratio']:.0%} of {clock_time(goodput['wall_s'] or 0.0)}: {went}"]


def _budget_lines(budgets: dict[str, dict[str, int | None]] | None) -> list[str]:
    """How often attempts ended by what, since a person last started it, and may still."""
    if budgets is None:
        return []
    words: list[str] = []
    for verdict, budget in budgets.items():
        left = "no limit" if budget["left"] is None else f"{budget['left']} left"
        words.append(f"{verdict} {budget['used']} ({left})")
    pairs = [", ".join(words[n : n + 2]) for n in range(0, len(words), 2)]
    return [f"{'' if n else 'retries':<12}{pair}" for n, pair in enumerate(pairs)]


def checkpoint_lines(facts: dict[str, Any]) -> list[str]:
    """`vitra checkpoints`."""
    lines = [f"{facts['uri']}  (run {facts['run_id']})"]
    for one in facts["complete"]:
        checked = "every byte checked" if one["verified"] else "complete"
        size = f"{size_text(one['size_bytes'])} in {one['files']} files"
        lines.append(
            f"step {one['step']:>8}  {checked}, {size}, attempt {one['attempt']}, "
            f"{one['created_at']}"
        )
    lines += [f"step {one['step']:>8}  DAMAGED: {one['reason']}" for one in facts["damaged"]]
    lines += [f"step {one['step']:>8}  incomplete: {one['reason']}" for one in facts["incomplete"]]
    if len(lines) == 1:
        lines.append("no checkpoint yet")
    return lines


def ending_lines(run_dir: RunDir, ending: Ending, run: str) -> list[str]:
    """The last words of a supervised run: what came of it, and what to type next.

    `run` is what to type for RUN.
    """
    from trainer.spec.outcome import RunState

    lines = [f"{ending.state}: {ending.reason}"]
    resume = (f"vitra resume {run}", "goes on exactly where it was")
    status = (f"vitra status {run}", "what happened, attempt by attempt")
    match ending.state:
        case RunState.COMPLETED:
            lines += _learned(run_dir)
            lines += next_lines(
                status,
                (f"vitra checkpoints {run} --verify", "reads every byte of what it has learnt"),
                (f"vitra resume {run} -o train.max_steps=N", "trains it further"),
            )
        case RunState.CANCELLED:
            lines += next_lines(resume)
        case _:
            newest = max(run_dir.attempt_numbers(), default=0)
            lines.append(f"logs: {run_dir.attempt(newest).logs}")
            lines += next_lines(status, resume)
    return lines


def _learned(run_dir: RunDir) -> list[str]:
    """How far the loss fell: the means of the first and of the last ten logged steps."""
    losses = [float(record["loss"]) for record in read_lines(run_dir.metrics)]
    if len(losses) < 20:
        return []
    first, last = sum(losses[:10]) / 10, sum(losses[-10:]) / 10
    return [f"loss {first:.4f} -> {last:.4f} (means of the first and the last ten logged steps)"]
