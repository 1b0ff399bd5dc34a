"""What a rank finds in its image, for `vitra doctor`: standard library only, one JSON document.

An image has no vitra, so the image's own Python gets this file's text: `python3 -P -c TEXT
REQUEST`. The request names packages to `import`, and paths to `read` and to `write`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import sys


def main(arguments: list[str]) -> int:
    """Import each package, look at each path, and say how it went."""
    request = json.loads(arguments[0])
    versions: dict[str, str] = {}
    problems: dict[str, str] = {}
    for name in request["import"]:
        try:
            importlib.import_module(name)
            versions[name] = importlib.metadata.version(name)
        except Exception as err:  # noqa: BLE001 - a library that is not there may show in any
            problems[name] = f"{type(err).__name__}: {err}"
    seen: dict[str, object] = {
        "python": platform.python_version(),
        "versions": versions,
        "problems": problems,
        "cuda": None,
        "unread": [path for path in request["read"] if not os.access(path, os.R_OK)],
        "unwritten": [path for path in request["write"] if not os.access(path, os.W_OK)],
    }
    if "torch" in versions:
        seen["cuda"] = importlib.import_module("torch").version.cuda
    # On a line of its own: packages may print when they are imported.
    sys.stdout.write("\n" + json.dumps(seen) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
