"""A job that says what happens to it, and leaves only when it is killed."""

from __future__ import annotations

from tests.cluster.handle import ClusterHandle

# One line for each start and signal; then, four times a second, how long ago the first signal was.
_WITNESS = """\
import os, signal, sys, time
life, heard = os.environ.get("SLURM_RESTART_COUNT", "first"), None
def say(words):
    os.write(1, f"life {life} {sys.argv[1]} {words}\\n".encode())
def hear(number, frame):
    global heard
    heard = heard or time.monotonic()
    say(signal.Signals(number).name)
for number in (signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, hear)
say("up")
while True:
    time.sleep(0.25)
    if heard:
        say(f"lived {time.monotonic() - heard:.1f}")
"""


def submit_witness(cluster: ClusterHandle, *options: str) -> int:
    """Submit a job of one witness a task (`rank`) and one beside them (`batch`).

    Returns:
        the job's id, once a rank is up.
    """
    program = cluster.share / "witness.py"
    program.write_text(_WITNESS)
    job = cluster.sbatch(
        f"/usr/bin/python3 {program} batch &\nsrun /usr/bin/python3 {program} rank &\nwait",
        *("--requeue", "--exclusive", "--time=30", *options),
    )
    cluster.wait_for_output(job, "rank up")
    return job


def lived_s(output: str, witness: str) -> float:
    """How long a witness of the first life went on after its first signal."""
    seen = f"life first {witness} lived "
    return max(float(line.removeprefix(seen)) for line in output.splitlines() if seen in line)
