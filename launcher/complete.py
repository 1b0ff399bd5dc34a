"""What a shell completes: runs, spec keys, templates. Nothing that goes wrong here may show."""

from __future__ import annotations

import os
from itertools import islice
from typing import Any

#: More would only scroll away.
_MOST_RUNS = 200


def complete_run(ctx: Any, incomplete: str) -> list[str]:
    """The ids of runs that begin with `incomplete`, newest first."""
    from launcher.registry import choose_run_root, runs
    from trainer.spec.errors import VitraError

    try:
        root = choose_run_root(ctx.params.get("run_root"), None, os.environ)
        matching = (run_id for run_id in runs(root) if run_id.startswith(incomplete))
        return list(islice(matching, _MOST_RUNS))
    except VitraError:
        return []


def complete_override(incomplete: str) -> list[str]:
    """The keys of the spec that begin with `incomplete`, ready for their value."""
    from launcher.load import spec_keys

    return [f"{key}=" for key in spec_keys() if key.startswith(incomplete)]


def complete_template(incomplete: str) -> list[str]:
    """The names of templates that begin with `incomplete`."""
    from launcher.templates import template_names

    return [name for name in template_names() if name.startswith(incomplete)]
