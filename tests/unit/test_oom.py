"""What the kernel counts as killed for lack of memory, in files as it writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.oom import oom_kills

V1 = "9:name=systemd:/\n4:memory:/slurm/job_7/step_0\n3:cpuset:/\n1:cpu,cpuacct:/\n0::/\n"
V2 = "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
EVENTS = "low 0\nhigh 0\nmax 31\noom 4\noom_kill {}\noom_group_kill 9\n"
PLACES = {
    "version 1": (V1, "memory/slurm/job_7/step_0/memory.oom_control", CONTROL),
    "version 2": (
        V2,
        "system.slice/slurmstepd.scope/job_7/step_0/user/task_0/memory.events",
        EVENTS,
    ),
    "in a container": ("0::/\n", "memory.events", EVENTS),
}


@pytest.mark.parametrize(("membership", "file", "text"), PLACES.values(), ids=PLACES.keys())
def test_the_kernels_count(tmp_path: Path, membership: str, file: str, text: str) -> None:
    own = tmp_path / "cgroup"
    own.write_text(membership)
    groups = tmp_path / "groups"
    assert oom_kills(own, groups) == 0, "nothing is counted"
    (groups / file).parent.mkdir(parents=True)
    for count in (0, 3):
        (groups / file).write_text(text.format(count))
        assert oom_kills(own, groups) == count


def test_where_there_are_no_groups(tmp_path: Path) -> None:
    assert oom_kills(tmp_path / "cgroup", tmp_path) == 0


def test_here() -> None:
    assert oom_kills() >= 0
