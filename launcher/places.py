"""Where `vitra doctor` looks: on a compute node, or on this host where no node can be asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from launcher import shell
from launcher.slurm import Slurm
from trainer.spec.errors import SchedulerError, SchedulerUnavailable, UsageError, VitraError
from trainer.spec.run import ResourcesSpec

#: How long to wait for a node that is free.
_NODE_WITHIN_S = 20
#: What srun says where it got no node.
_NO_NODE = "Unable to allocate resources"
_NODE_OPTIONS = ("partition", "account", "qos", "constraint", "reservation")


class NotAnswered(VitraError):
    """Nobody was there to ask, or nothing was heard in time: it says nothing about a run."""


class Place(Protocol):
    """A host on which programs can be run that look at something."""

    @property
    def is_node(self) -> bool:
        """Whether it is one that ranks run on."""
        ...

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """What a program prints there.

        Args:
            options: more of srun's, where srun starts it.
            environ: all that it finds around it; None: what Slurm's commands find.

        Raises:
            NotAnswered: it could not be run now, or not in time. VitraError: it failed.
        """
        ...


@dataclass(frozen=True)
class Node:
    """Some compute node, one that `resources` would get where a spec says which."""

    slurm: Slurm
    resources: ResourcesSpec | None = None
    is_node = True

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """As `Place` says; a failure is a SchedulerRejected."""
        which = [
            f"--{name}={value}"
            for name in _NODE_OPTIONS
            if (value := getattr(self.resources, name, None)) is not None
        ]
        try:
            return self.slurm.on_a_node(
                argv,
                [*which, *options],
                within_s=_NODE_WITHIN_S,
                timeout_s=timeout_s,
                environ=environ,
            )
        except SchedulerError as err:
            if isinstance(err, SchedulerUnavailable) or _NO_NODE in err.message:
                raise NotAnswered(err.message) from err
            raise


@dataclass(frozen=True)
class Here:
    """This host, which need not have what compute nodes have."""

    environ: Mapping[str, str]
    is_node = False

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        options: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """As `Place` says. What only srun can do (`options`) is not done here: NotAnswered."""
        if options:
            raise NotAnswered("only srun can start it")
        around = self.environ if environ is None else environ
        try:
            answer = shell.run(argv, timeout_s=timeout_s, env=around)
        except shell.CommandTimedOut as err:
            raise NotAnswered(err.message) from err
        except OSError as err:
            raise UsageError(f"{argv[0]}: {err.strerror}") from err
        if answer.returncode:
            said = "; ".join(line for line in answer.stderr.splitlines() if line.strip())
            raise UsageError(f"{Path(argv[0]).name}: {said or 'failed without a word'}")
        return answer.stdout.decode(errors="replace")
