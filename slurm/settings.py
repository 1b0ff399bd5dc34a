"""What a cluster is started with: the environment's SC_* variables, and names made from them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self


class ClusterError(Exception):
    """The cluster cannot do what was asked of it; the message says why and what helps."""


DEFAULT_STATE = "/var/tmp/vitra-cluster"


def state_directory(environ: Mapping[str, str]) -> Path:
    """Where the cluster that `environ` is about keeps everything."""
    return Path(environ.get("SC_STATE") or DEFAULT_STATE).resolve()


@dataclass(frozen=True)
class Settings:
    """One cluster. Two on one machine need their own state, port and net, and get along.

    Attributes:
        state: directory of configuration, logs, job history and data base.
        nodes: how many there are, named node1, node2 ...
        accounting: with slurmdbd and MariaDB, so that sacct answers.
        user: an unprivileged user who may submit, made if it is missing.
        gpus, cpus, memory_mb: what each node claims to have.
        grace_s: GraceTime of the partitions low and scav.
        kill_wait_s, slurmd_timeout_s: KillWait and SlurmdTimeout.
        cred_expire_s: also the pause before a requeued job may start again (Slurm's default: 120).
        ctld_params: SlurmctldParameters, such as preempt_send_user_signal.
        net: the first three numbers of the nodes' addresses; the host is net.254.
        port: of slurmctld; the next three are slurmd's, slurmdbd's and MariaDB's.
    """

    state: Path
    nodes: int = 4
    accounting: bool = True
    user: str = "trainer"
    gpus: int = 8
    cpus: int = 64
    memory_mb: int = 512_000
    grace_s: int = 20
    kill_wait_s: int = 5
    slurmd_timeout_s: int = 20
    cred_expire_s: int = 5
    ctld_params: str = ""
    net: str = "10.79.0"
    port: int = 26_917

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], nodes: int | None = None) -> Self:
        """Defaults, changed by SC_* variables; `nodes` goes before SC_NODES.

        Raises:
            ClusterError: a variable has a value that cannot be.
        """
        given = cls(
            state=state_directory(environ),
            nodes=_number(environ, "SC_NODES", cls.nodes),
            accounting=_choice(environ, "SC_ACCT", {"slurmdbd": True, "none": False}),
            user=environ.get("SC_USER") or cls.user,
            gpus=_number(environ, "SC_GPUS", cls.gpus),
            cpus=_number(environ, "SC_CPUS", cls.cpus),
            memory_mb=_number(environ, "SC_MEM_MB", cls.memory_mb),
            grace_s=_number(environ, "SC_GRACE", cls.grace_s, least=0),
            kill_wait_s=_number(environ, "SC_KILLWAIT", cls.kill_wait_s),
            slurmd_timeout_s=_number(environ, "SC_SLURMD_TIMEOUT", cls.slurmd_timeout_s),
            cred_expire_s=_number(environ, "SC_CRED_EXPIRE", cls.cred_expire_s),
            ctld_params=environ.get("SC_CTLD_PARAMS", ""),
            net=environ.get("SC_NET") or cls.net,
            port=_number(environ, "SC_PORT", cls.port),
        )
        if nodes is not None:
            given = replace(given, nodes=nodes)
        if not 1 <= given.nodes <= 200:
            raise ClusterError(f"{given.nodes} nodes: 1 to 200 can be had")
        if not re.fullmatch(r"\d{1,3}\.\d{1,3}\.\d{1,3}", given.net):
            raise ClusterError(f"SC_NET={given.net}: must be three numbers, such as 10.79.0")
        if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,30}", given.user):
            raise ClusterError(f"SC_USER={given.user}: not the name of a user")
        return given

    @classmethod
    def load(cls, state: Path) -> Self:
        """Those that the cluster in `state` was last started with.

        Raises:
            ClusterError: none was.
        """
        try:
            said = json.loads((state / "settings.json").read_text())
        except FileNotFoundError:
            raise ClusterError(
                f"there is no cluster in {state}: start one, or set SC_STATE"
            ) from None
        names = {field.name for field in fields(cls)}
        known: dict[str, Any] = {name: value for name, value in said.items() if name in names}
        known["state"] = state
        return cls(**known)

    def save(self) -> None:
        """For `load`."""
        text = json.dumps({**asdict(self), "state": str(self.state)}, indent=1)
        scratch = self.state / "settings.json.new"
        scratch.write_text(text + "\n")
        scratch.rename(self.state / "settings.json")

    @property
    def conf(self) -> Path:
        """slurm.conf, which SLURM_CONF has to name."""
        return self.state / "etc" / "slurm.conf"

    @property
    def extra_conf(self) -> Path:
        """What `set` has changed of slurm.conf, included by it."""
        return self.state / "etc" / "extra.conf"

    @property
    def run(self) -> Path:
        """Pid files and sockets."""
        return self.state / "run"

    @property
    def log(self) -> Path:
        """What every daemon says."""
        return self.state / "log"

    @property
    def munge_socket(self) -> Path:
        return self.run / "munge" / "munge.socket"

    @property
    def mysql_socket(self) -> Path:
        return self.run / "mysql" / "sock"

    @property
    def slurmd_port(self) -> int:
        return self.port + 1

    @property
    def slurmdbd_port(self) -> int:
        return self.port + 2

    @property
    def mysql_port(self) -> int:
        return self.port + 3

    @property
    def host_address(self) -> str:
        """Of the machine itself, as the nodes see it."""
        return f"{self.net}.254"

    @property
    def node_names(self) -> list[str]:
        return [f"node{number}" for number in range(1, self.nodes + 1)]

    def node_address(self, node: str) -> str:
        return f"{self.net}.{node.removeprefix('node')}"

    def node(self, name: str) -> str:
        """The node's full name: `2` and `node2` mean the same.

        Raises:
            ClusterError: there is no such node.
        """
        full = f"node{name.removeprefix('node')}"
        if full not in self.node_names:
            raise ClusterError(f"no node {name}: there are {', '.join(self.node_names)}")
        return full

    @property
    def daemon_environ(self) -> dict[str, str]:
        """For the daemons and for the client commands that the cluster itself runs.

        Nothing of the caller's: what it has set for jobs of its own (SLURM_*, SBATCH_*) must not
        reach a cluster that others use too.
        """
        return {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LC_ALL": "C",
            "SLURM_CONF": str(self.conf),
        }


def _number(environ: Mapping[str, str], name: str, default: int, least: int = 1) -> int:
    text = environ.get(name) or str(default)
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise ClusterError(f"{name}={text}: must be a whole number of at least {least}")
    return int(text)


def _choice(environ: Mapping[str, str], name: str, choices: Mapping[str, bool]) -> bool:
    text = environ.get(name) or next(iter(choices))
    if text not in choices:
        raise ClusterError(f"{name}={text}: must be {' or '.join(choices)}")
    return choices[text]


def current_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Those of the cluster that `environ` is about, running or stopped."""
    return Settings.load(state_directory(environ))
