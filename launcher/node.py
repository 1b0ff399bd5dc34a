"""What a compute node sees, for `vitra doctor`: standard library only, one JSON document.

`python -P -m launcher.node MARKER`: MARKER is a file that the asking host has just written.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Read the marker, write beside it and remove that again; say how it went."""
    marker = Path(arguments[0])
    seen: dict[str, object] = {
        "host": os.uname().nodename,
        "time": time.time(),
        "read": None,
        "written": False,
        "problem": None,
    }
    beside = marker.with_name(f"{marker.name}.node")
    try:
        seen["read"] = marker.read_text()
        beside.write_bytes(b"x")
        seen["written"] = True
        beside.unlink()
    except OSError as err:
        seen["problem"] = f"{err.filename}: {err.strerror}"
    sys.stdout.write(json.dumps(seen) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
