"""Asking the trainer: the launcher never loads torch, so a process that does gives the answer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from launcher import shell
from trainer.spec.errors import VitraError


def ask_trainer(
    question: str, request: bytes, *, environ: Mapping[str, str], timeout_s: float, doing: str
) -> dict[str, Any]:
    """Run `python -P -m trainer --QUESTION`, which reads `request` and answers with one document.

    `environ` is all of that process's environment. `doing` is what is tried, for the error: an
    answer that names an error of its own is returned like any other.

    Raises:
        VitraError: there was no answer, or none in time.
    """
    answer = shell.run(
        [sys.executable, "-P", "-m", "trainer", f"--{question}"],
        timeout_s=timeout_s,
        stdin=request,
        env={**environ, "VITRA_PARENT_PID": str(os.getpid())},
    )
    try:
        result: dict[str, Any] = json.loads(answer.stdout)
    except ValueError:
        last = (answer.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise VitraError(f"{doing} failed with exit code {answer.returncode}: {last}") from None
    return result
