"""How a trainer process answers the launcher: one JSON document, for an error as for a result."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TextIO

from trainer.spec.errors import VitraError


def answer(out: TextIO, work: Callable[[], dict[str, Any]]) -> int:
    """Write what `work` returns; for a VitraError {"error": class, "message", "hint"}.

    Returns 0 or the error's exit code.
    """
    try:
        result, code = work(), 0
    except VitraError as err:
        result = {"error": type(err).__name__, "message": err.message, "hint": err.hint}
        code = err.exit_code
    out.write(json.dumps(result) + "\n")
    return code
