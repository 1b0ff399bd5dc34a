"""Whether the kernel has killed for lack of memory, by its own count. Standard library only.

A process that is killed for that cannot say so, and all that its parent sees is SIGKILL, as from
anybody. But the kernel counts in each control group what it has killed there, whether the limit was
the group's, as a batch system sets it for a job, or the machine's.
"""

from __future__ import annotations

import re
from pathlib import Path

_MEMBERSHIP = Path("/proc/self/cgroup")
_GROUPS = Path("/sys/fs/cgroup")
_COUNT = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def oom_kills(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int:
    """How often that has happened in this process's group; 0 where it is not counted."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return 0
    found = 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            file = groups / path.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            # Version 1, where each controller has a hierarchy of its own.
            file = groups / "memory" / path.lstrip("/") / "memory.oom_control"
        else:
            continue
        try:
            count = _COUNT.search(file.read_text())
        except OSError:
            # Version 2 beside version 1 has no memory controller; and a container may hide both.
            continue
        found += int(count[1]) if count else 0
    return found
