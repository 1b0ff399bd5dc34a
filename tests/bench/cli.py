"""What a command costs before it does anything: `python -m tests.bench.cli`.

Times whole processes in turn, so that whatever else the machine does hits all of them, and prints
the least of each as a multiple of `python -c pass`. Where torchx is on PATH (it is no dependency),
its dry run for Slurm is measured beside `vitra plan`.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import vitra_command

#: The most that each may take, as a multiple of what it is held against.
GOALS = {"help": 7.0, "plan": 16.0, "submit --dry-run": 18.0}
TORCHX_GOAL = 0.75
_SPEC = Path(__file__).parents[2] / "launcher" / "examples" / "quickstart.yaml"


def commands(directory: Path) -> dict[str, list[str]]:
    """What is measured, by name; the first is the measure."""
    vitra = vitra_command()
    spec = str(_SPEC)
    found = {
        "python": [sys.executable, "-c", "pass"],
        "help": [vitra, "--help"],
        "plan": [vitra, "plan", spec],
        "submit --dry-run": [vitra, "submit", spec, "--dry-run"],
    }
    if torchx := shutil.which("torchx"):
        script = directory / "train.py"
        script.touch()
        words = ["run", "--dryrun", "-s", "slurm", "dist.ddp", "-j", "2x2", "--script", str(script)]
        found["torchx run --dryrun"] = [torchx, *words]
    return found


def measure(argvs: dict[str, list[str]], rounds: int, directory: Path) -> dict[str, float]:
    """The least seconds of each command."""
    least = dict.fromkeys(argvs, float("inf"))
    for _ in range(rounds):
        for name, argv in argvs.items():
            began = time.perf_counter()
            subprocess.run(argv, cwd=directory, capture_output=True, check=True, timeout=120)
            least[name] = min(least[name], time.perf_counter() - began)
    return least


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What a command costs before it does anything.")
    parser.add_argument("--rounds", type=int, default=15, help="how often each is run (15)")
    rounds = parser.parse_args(arguments).rounds
    with tempfile.TemporaryDirectory() as directory:
        least = measure(commands(Path(directory)), rounds, Path(directory))
    for name, seconds in least.items():
        ratio = seconds / least["python"]
        goal = f"goal {GOALS[name]:g}" if name in GOALS else ""
        sys.stdout.write(f"{name:22} {1000 * seconds:8.1f} ms {ratio:7.2f} x python   {goal}\n")
    if other := least.get("torchx run --dryrun"):
        ratio = least["plan"] / other
        sys.stdout.write(f"plan / torchx run --dryrun: {ratio:.2f}   goal {TORCHX_GOAL:g}\n")


if __name__ == "__main__":
    main()
