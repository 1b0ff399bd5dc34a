"""The environment of a rank: what vitra sets, and what of the shell around it must not reach it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainer.spec.plan import Plan
from trainer.spec.pulse import PULSE_VARIABLE
from trainer.spec.ranks import LAUNCH_VARIABLES
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot

#: Says where the cluster is; everything else of Slurm's is about one job.
_CLUSTER = "SLURM_CONF"
#: Left over in a shell from another launcher or allocation, these send ranks looking for strangers.
_STALE_PREFIXES = ("SLURM_", "SBATCH_", "SRUN_", "TORCHELASTIC_", "PMI_", "PMIX_", "OMPI_")
_STALE_NAMES = frozenset(
    (
        *LAUNCH_VARIABLES,
        PULSE_VARIABLE,
        "VITRA_PARENT_PID",
        "GROUP_RANK",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
    )
)


def without_stale(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` less the variables of other launchers and allocations."""
    return {
        name: value
        for name, value in environ.items()
        if name == _CLUSTER or (name not in _STALE_NAMES and not name.startswith(_STALE_PREFIXES))
    }


def component_environment(environ: Mapping[str, str], spec: RunSpec) -> dict[str, str]:
    """What a component of the spec finds around it, in a rank as in the probe."""
    own = {name: value for name, value in spec.resources.env.items() if value is not None}
    return without_stale(environ) | own


def rank_environment(
    environ: Mapping[str, str], plan: Plan, run_dir: RunDir, attempt: int
) -> dict[str, str]:
    """All but the rank's own numbers (RANK, LOCAL_RANK, MASTER_ADDR ...).

    Threads are fixed, and MKL is told to compute alike whatever a buffer's alignment, since both
    change results in the last bit; they have to be set before torch is loaded. The spec's own
    variables come last.
    """
    threads = str(plan.threads_per_rank)
    fixed = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_CBWR": "AUTO",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTHONUNBUFFERED": "1",
    }
    launch = {
        "VITRA_RUN_ID": plan.run_id,
        "VITRA_RUN_DIR": str(run_dir.path),
        "VITRA_ATTEMPT": str(attempt),
    }
    return component_environment({**environ, **fixed}, plan.spec) | launch


def importing(environ: Mapping[str, str], path: Iterable[str]) -> dict[str, str]:
    """`environ` with these directories, and no others, to import from before what is installed."""
    joined = os.pathsep.join(dict.fromkeys(path))
    rest = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return rest | ({"PYTHONPATH": joined} if joined else {})


def with_own_code(
    environ: Mapping[str, str], run_dir: RunDir, snapshot: Snapshot
) -> dict[str, str]:
    """`environ` such that a rank imports the code that was submitted, wherever it is started.

    What PYTHONPATH names comes after that, less the trees that were copied: those may have changed.
    """
    present = environ.get("PYTHONPATH", "").split(os.pathsep)
    # A relative directory meant another one at submit, where it was made absolute.
    others = [entry for entry in present if Path(entry).is_absolute()]
    return importing(
        environ,
        (
            *(str(run_dir.code / place) for place in snapshot.path),
            *snapshot.outside,
            *(entry for entry in others if not snapshot.is_live(Path(entry), run_dir)),
        ),
    )
