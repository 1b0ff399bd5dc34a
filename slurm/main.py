"""The command line of the test cluster."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

from slurm.cluster import DAEMONS, Cluster
from slurm.settings import ClusterError, Settings, current_settings, state_directory


def main() -> int:
    """Run the command that sys.argv names.

    Returns:
        0; 1 if it could not be done, or `status` finds nothing that runs; 2 for a wrong call; 3 if
        `status` finds a part that does not run.
    """
    began = time.monotonic()

    def say(line: str) -> None:
        sys.stderr.write(f"[{time.monotonic() - began:6.2f} s] {line}\n")

    arguments = _parser().parse_args()
    try:
        return _COMMANDS[arguments.command](arguments, say)
    except ClusterError as err:
        say(f"ERROR: {err}")
        return 1


_Say = Callable[[str], None]


def _start(arguments: argparse.Namespace, say: _Say) -> int:
    wanted = Settings.from_environ(os.environ, arguments.nodes)
    running = _running(say)
    if running is None:
        Cluster(wanted, say).start()
        return 0
    if running.settings != wanted:
        say("it runs already and keeps its settings; `restart` changes them")
    running.start()
    return 0


def _restart(arguments: argparse.Namespace, say: _Say) -> int:
    wanted = Settings.from_environ(os.environ, arguments.nodes)
    if (running := _running(say)) is not None:
        running.stop()
    Cluster(wanted, say).start()
    return 0


def _status(_arguments: argparse.Namespace, say: _Say) -> int:
    pids = _cluster(say).status()
    for name, pid in pids.items():
        sys.stdout.write(f"{name:10} {f'pid {pid}' if pid else 'DOWN'}\n")
    if not any(pids.values()):
        return 1
    return 0 if all(pids.values()) else 3


def _env(_arguments: argparse.Namespace, _say: _Say) -> int:
    sys.stdout.write(f"export SLURM_CONF={current_settings().conf}\n")
    return 0


def _exec(arguments: argparse.Namespace, say: _Say) -> int:
    cluster = _cluster(say)
    argv = [*cluster.enter(arguments.node), *arguments.argv]
    environ = {**os.environ, "SLURM_CONF": str(cluster.settings.conf)}
    os.execvpe(argv[0], argv, environ)


def _ps(arguments: argparse.Namespace, say: _Say) -> int:
    for process in _cluster(say).processes(arguments.node):
        sys.stdout.write(f"{process.node} {process.pid} {' '.join(process.argv)}\n")
    return 0


def _on_cluster(act: Callable[[Cluster, argparse.Namespace], None]) -> _Command:
    def command(arguments: argparse.Namespace, say: _Say) -> int:
        act(_cluster(say), arguments)
        return 0

    return command


_Command = Callable[[argparse.Namespace, _Say], int]

_COMMANDS: dict[str, _Command] = {
    "start": _start,
    "stop": _on_cluster(lambda cluster, _: cluster.stop()),
    "restart": _restart,
    "status": _status,
    "env": _env,
    "purge": _on_cluster(lambda cluster, _: cluster.purge()),
    "clear": _on_cluster(lambda cluster, _: cluster.clear()),
    "crash": _on_cluster(lambda cluster, said: cluster.crash(said.node)),
    "boot": _on_cluster(lambda cluster, said: cluster.boot(said.node)),
    "cut": _on_cluster(lambda cluster, said: cluster.cut(said.node)),
    "heal": _on_cluster(lambda cluster, said: cluster.heal(said.node)),
    "exec": _exec,
    "ps": _ps,
    "down": _on_cluster(lambda cluster, said: cluster.down(said.daemon)),
    "up": _on_cluster(lambda cluster, said: cluster.up(said.daemon)),
    "set": _on_cluster(lambda cluster, said: cluster.set_conf(said.assignment)),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slurm/cluster", description="A real Slurm cluster of several nodes on one machine."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, does: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=does, description=does)

    for name, does in {
        "start": "install what is missing and start it; what runs already is left alone",
        "restart": "stop it and start it with the settings of the environment",
    }.items():
        add(name, does).add_argument("nodes", type=int, nargs="?", help="how many (default 4)")
    add("stop", "stop it; jobs die, job history is kept")
    add("status", "what runs; exit code 3 if a part does not, 1 if nothing does")
    add("env", "print the export that makes Slurm's commands use it")
    add("purge", "stop it and delete all that it has written")
    add("clear", "end all jobs and undo crash, cut, down and set; wait until all nodes are idle")
    for name, does in {
        "crash": "power-cut a node: every process on it dies at once",
        "boot": "start a crashed node again",
        "cut": "take a node off the network; what runs on it goes on",
        "heal": "undo cut",
    }.items():
        add(name, does).add_argument("node")
    run_on = add("exec", "run a command on a node, as root")
    run_on.add_argument("node")
    run_on.add_argument("argv", nargs=argparse.REMAINDER, metavar="command")
    add("ps", "what jobs have running: node, pid on this machine, command").add_argument(
        "node", nargs="?"
    )
    for name, does in {
        "down": "stop a daemon alone",
        "up": "start it again",
    }.items():
        add(name, does).add_argument("daemon", choices=DAEMONS)
    add("set", "change lines of slurm.conf until clear or the next set").add_argument(
        "assignment", nargs="*", metavar="KEY=VALUE"
    )
    return parser


def _cluster(say: _Say) -> Cluster:
    return Cluster(current_settings(), say)


def _running(say: _Say) -> Cluster | None:
    """The cluster of this environment, if its controller lives."""
    if not (state_directory(os.environ) / "settings.json").exists():
        return None
    cluster = _cluster(say)
    return cluster if cluster.status()["slurmctld"] else None
