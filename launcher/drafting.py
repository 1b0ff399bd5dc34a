"""A spec and its plan, before anything is written: all that `vitra plan` loads."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from launcher.container import check_container
from launcher.load import LoadedSpec, load_spec
from launcher.planner import plan
from launcher.profiles import find_profiles
from launcher.registry import DRY_RUN_SUFFIX, absolute, choose_run_root
from trainer.spec.plan import Plan

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"


class Draft(NamedTuple):
    """A spec with its plan, before anything is written. The run id ends in DRYRUN."""

    loaded: LoadedSpec
    plan: Plan
    run_root: Path


def draft(
    spec_path: Path,
    overrides: Sequence[str],
    *,
    run_root: str | None,
    environ: Mapping[str, str],
    profile: str | None = None,
) -> Draft:
    """Load and plan; touches nothing.

    Raises:
        SpecError, PlanError: the spec is refused.
        UsageError: there is no such profile, or the container that it asks for cannot be given what
            the ranks need.
    """
    profiles = [] if profile is None else find_profiles(profile, environ)
    with _no_plugins():
        loaded = load_spec(spec_path, overrides, environ=environ, profiles=profiles)
        root = choose_run_root(run_root, loaded.spec.run_root, environ)
        planned = plan_in(loaded, root, f"{loaded.spec.name}-{DRY_RUN_SUFFIX}")
    check_container(planned, absolute("."))
    return Draft(loaded, planned, root)


def script(draft_: Draft) -> str:
    """The batch script that submit sends, byte for byte."""
    from launcher.request import build_request, render

    return render(build_request(draft_.plan, python=sys.executable))


def plan_in(loaded: LoadedSpec, run_root: Path, run_id: str) -> Plan:
    """The plan of a run of that id. Raises PlanError: there is none."""
    return plan(
        loaded.spec, run_id=run_id, run_dir=str(run_root / run_id), base_dir=str(absolute("."))
    )


@contextmanager
def _no_plugins() -> Generator[None]:
    """Whoever first uses a model lets pydantic read the metadata of every installed package, for
    plugins: a fifteenth of the time of `vitra plan`, and no spec would be another for one.
    """
    before = os.environ.get(_PLUGINS)
    os.environ[_PLUGINS] = "__all__"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PLUGINS]
        else:
            os.environ[_PLUGINS] = before
