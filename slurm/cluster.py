"""Starting, breaking, mending and stopping the cluster."""

from __future__ import annotations

import fcntl
import os
import pwd
import shutil
import signal
import socket
import stat
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from slurm import conf
from slurm.network import Network
from slurm.packages import install_missing
from slurm.processes import Daemons, run, start_time, succeeds, wait_until
from slurm.settings import ClusterError, Settings

_MARKER = ".vitra-cluster"
_ETC_LINK = Path("/etc/slurm/slurm.conf")
#: Daemons that `down` and `up` know.
DAEMONS = ("slurmctld", "slurmdbd")


@dataclass(frozen=True)
class NodeProcess:
    """A process that runs on a node and is no part of Slurm or of the node itself."""

    node: str
    pid: int
    """As the host numbers it."""
    argv: tuple[str, ...]


class Cluster:
    """One cluster, running or not. Every method may be called by several processes at once."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        """Touches nothing. `say` gets a line of progress now and then."""
        self.settings = settings
        self._say = say
        self._environ = settings.daemon_environ
        self._daemons = Daemons(settings.run, settings.log, self._environ)
        self._network = Network(settings)

    # The whole cluster.

    def start(self) -> None:
        """Start all that does not run; returns once every node is idle, or at work.

        Raises:
            ClusterError: it cannot run here; the message says what is missing.
        """
        settings = self.settings
        if (why := why_impossible()) is not None:
            raise ClusterError(why)
        self._make_state()
        with self._locked():
            install_missing(settings, self._say)
            self._make_directories()
            self._make_user()
            if not self._daemons.pid("slurmctld"):
                self._write_configuration()
            settings.save()
            self._network.up()
            self._start_accounting_database()
            self._start_munge()
            self._start_slurmdbd()
            self._start_slurmctld()
            for node in settings.node_names:
                self._start_node(node)
            wait_until(lambda: not self._nodes_not_in({"idle", "mix", "alloc"}), "the nodes", 60)
        self._say(f"up: {settings.nodes} nodes, export SLURM_CONF={settings.conf}")

    def stop(self) -> None:
        """Stop all of it. Jobs die; job history and configuration stay."""
        with self._locked():
            # It saves its state at once and then lingers for ten seconds.
            self._daemons.halt("slurmctld", signal.SIGTERM, within_s=4)
            for node in self.settings.node_names:
                self._stop_node(node)
            self._daemons.halt("slurmdbd", signal.SIGTERM, within_s=8)
            self._daemons.halt("mariadbd", signal.SIGTERM, within_s=30)
            self._daemons.halt("munged", signal.SIGTERM, within_s=5)
            self._network.down()
            if self._is_our_link():
                _ETC_LINK.unlink()
        self._say("stopped")

    def purge(self) -> None:
        """Stop it and delete its state directory, and its user if the home lies in there."""
        state = self.settings.state
        if not (state / _MARKER).exists():
            raise ClusterError(f"{state} is not the directory of a cluster: nothing is deleted")
        self.stop()
        user = self.settings.user
        if state in Path(_home(user) or "/").parents:
            # Refused while something of the user's runs: it then belongs to more than this cluster.
            succeeds(["userdel", user], self._environ)
        shutil.rmtree(state)

    def status(self) -> dict[str, int | None]:
        """The pid of each daemon and node; None for what does not run."""
        names = ["munged", "slurmctld"]
        if self.settings.accounting:
            names += ["mariadbd", "slurmdbd"]
        pids = {name: self._daemons.pid(name) for name in names}
        return {**pids, **{n: self._daemons.pid(_daemon(n)) for n in self.settings.node_names}}

    def clear(self) -> None:
        """Make it as good as new: no jobs, nothing set, down, cut or crashed, every node idle.

        Raises:
            ClusterError: it cannot be done within some two minutes.
        """
        with self._locked():
            self._start_slurmdbd()
            self._start_slurmctld()
            if self.settings.extra_conf.read_text() != conf.EXTRA_CONF:
                self._set_conf([])
            for node in self.settings.node_names:
                self._network.heal(node)
                self._start_node(node)
            wait_until(self._no_jobs, "all jobs to end", 60)
            for process in self.processes():
                self._say(f"left over on {process.node}, killed: {' '.join(process.argv)[:200]}")
                _kill(process.pid)
            wait_until(lambda: self._resumed({"idle"}), "all nodes to be idle", 60)

    # Parts of it.

    def crash(self, node: str) -> None:
        """Power-cut a node: every process on it dies at once."""
        self._stop_node(self.settings.node(node))

    def boot(self, node: str) -> None:
        """Start a crashed node; returns once Slurm may use it."""
        name = self.settings.node(node)
        self._start_node(name)
        usable = {"idle", "mix", "alloc", "comp"}
        wait_until(lambda: self._resumed(usable, name), f"{name} to be usable", 60)

    def cut(self, node: str) -> None:
        """Take the node off the network; what runs on it goes on."""
        self._network.cut(self.settings.node(node))

    def heal(self, node: str) -> None:
        """Undo `cut`."""
        self._network.heal(self.settings.node(node))

    def down(self, daemon: str) -> None:
        """Stop slurmctld or slurmdbd alone."""
        self._daemons.halt(_known(daemon), signal.SIGTERM, within_s=4)

    def up(self, daemon: str) -> None:
        """Start it again; returns once it answers."""
        self._start_slurmctld() if _known(daemon) == "slurmctld" else self._start_slurmdbd()

    def set_conf(self, assignments: Sequence[str]) -> None:
        """Change slurm.conf while the cluster runs, until `clear` or the next call.

        Args:
            assignments: lines such as `JobRequeue=0`; none: back to what it was started with.

        Raises:
            ClusterError: Slurm refuses them.
        """
        self._set_conf(assignments)

    def enter(self, node: str) -> list[str]:
        """The beginning of a command line that runs the rest of it on a node, as root."""
        name = self.settings.node(node)
        return ["nsenter", "-t", str(self._node_init(name)), "-n", "-u", "-m", "-p"]

    def processes(self, node: str | None = None) -> list[NodeProcess]:
        """What jobs, and whoever used `enter`, have running on one node or on all."""
        wanted = self.settings.node_names if node is None else [self.settings.node(node)]
        nodes = {
            _pid_space(self._node_init(name)): name
            for name in wanted
            if self._daemons.pid(_daemon(name))
        }
        found: list[NodeProcess] = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                name = nodes.get(_pid_space(entry.name))
                if name is None or _own_number(entry) == 1:
                    continue
                if start_time(int(entry.name)) is None:
                    continue
                argv = (entry / "cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                # Gone, or none of ours: a container's root may not look at everything.
                continue
            if not argv[0].startswith(("slurmd", "slurmstepd")):
                found.append(NodeProcess(name, int(entry.name), tuple(argv)))
        return sorted(found, key=lambda process: process.pid)

    # How it is done.

    def _make_state(self) -> None:
        state = self.settings.state
        state.mkdir(mode=0o755, parents=True, exist_ok=True)
        if state.stat().st_uid != 0 or not stat.S_ISDIR(state.lstat().st_mode):
            raise ClusterError(f"{state} belongs to somebody else: set SC_STATE")
        if not (state / _MARKER).exists():
            if any(state.iterdir()):
                raise ClusterError(f"{state} holds something else: set SC_STATE to a new directory")
            (state / _MARKER).touch()
        state.chmod(0o755)
        for name in ("log", "run", "etc", "dev", "spool", "home", "share"):
            (state / name).mkdir(mode=0o755, exist_ok=True)

    def _make_directories(self) -> None:
        state, run_ = self.settings.state, self.settings.run
        wanted = [
            (self.settings.log, "slurm", 0o755),
            (state / "ctld", "slurm", 0o700),
            (state / "munge", "munge", 0o700),
            (run_ / "munge", "munge", 0o755),
            # Daemons that do not run as root leave pid files of their own here.
            (run_, "root", 0o1777),
            (state / "share", "root", 0o1777),
            *((state / "spool" / node, "root", 0o755) for node in self.settings.node_names),
        ]
        if self.settings.accounting:
            wanted += [(state / "mysql", "mysql", 0o700), (run_ / "mysql", "mysql", 0o755)]
        for path, owner, mode in wanted:
            path.mkdir(exist_ok=True)
            shutil.chown(path, owner, owner)
            path.chmod(mode)
        for number in range(self.settings.gpus):
            device = state / "dev" / f"nvidia{number}"
            if not device.exists():
                _make_device(device)

    def _make_user(self) -> None:
        if _home(self.settings.user) is None:
            home = self.settings.state / "home" / self.settings.user
            run(
                ["useradd", "-m", "-d", home, "-s", "/bin/bash", self.settings.user],
                self._environ,
            )

    def _write_configuration(self) -> None:
        settings, host, etc = self.settings, _host(), self.settings.state / "etc"
        switch = Path("/etc/nsswitch.conf").read_text().splitlines()
        texts = {
            "slurm.conf": conf.slurm_conf(settings, host),
            "extra.conf": conf.EXTRA_CONF,
            "gres.conf": conf.gres_conf(settings),
            # Where there is none, Slurm looks for one that is not of this cluster.
            "cgroup.conf": "",
            "hosts": conf.hosts(settings, host),
            "resolv.conf": "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
            "nsswitch.conf": "".join(
                "hosts: files\n" if line.startswith("hosts:") else f"{line}\n" for line in switch
            ),
        }
        for name, text in texts.items():
            (etc / name).write_text(text)
        if settings.accounting:
            path = etc / "slurmdbd.conf"
            path.touch(mode=0o600)
            path.write_text(conf.slurmdbd_conf(settings, host))
            shutil.chown(path, "slurm", "slurm")
        # So that a plain `sbatch` finds the cluster. Never in place of another cluster's.
        if not _ETC_LINK.exists():
            _ETC_LINK.parent.mkdir(exist_ok=True)
            _ETC_LINK.unlink(missing_ok=True)
            _ETC_LINK.symlink_to(settings.conf)

    def _is_our_link(self) -> bool:
        return _ETC_LINK.is_symlink() and _ETC_LINK.readlink() == self.settings.conf

    def _start_munge(self) -> None:
        if self._daemons.pid("munged"):
            return
        settings = self.settings
        directory, socket_ = settings.state / "munge", settings.munge_socket
        key = directory / "key"
        if not key.exists():
            key.touch(mode=0o400)
            key.write_bytes(os.urandom(128))
            shutil.chown(key, "munge", "munge")
        for stale in socket_.parent.glob("munge.socket*"):
            stale.unlink()
        options = {
            "key-file": key,
            "socket": socket_,
            "pid-file": settings.run / "munge" / "munged.pid",
            "log-file": directory / "munged.log",
            "seed-file": directory / "seed",
        }
        words = [f"--{name}={value}" for name, value in options.items()]
        self._daemons.spawn("munged", [*_as("munge"), "munged", "--foreground", *words])
        ready = ["munge", "-S", socket_, "-n"]
        self._daemons.wait_ready("munged", lambda: succeeds(ready, self._environ), 15)

    def _start_accounting_database(self) -> None:
        """Spawned only: it gets ready while munge starts."""
        if not self.settings.accounting or self._daemons.pid("mariadbd"):
            return
        data = self.settings.state / "mysql"
        own = ["--no-defaults", "--user=mysql", f"--datadir={data}"]
        if not (data / "mysql").exists():
            install = ["--auth-root-authentication-method=normal", "--skip-test-db"]
            run(
                ["mariadb-install-db", *own, *install],
                self._environ,
                within_s=120,
                log=self.settings.log / "mariadb-install.out",
            )
        socket_ = self.settings.mysql_socket
        socket_.unlink(missing_ok=True)
        options = [
            f"--socket={socket_}",
            f"--pid-file={socket_.with_name('pid')}",
            "--bind-address=127.0.0.1",
            f"--port={self.settings.mysql_port}",
            "--innodb-buffer-pool-size=128M",
            "--innodb-log-file-size=64M",
            "--innodb-lock-wait-timeout=900",
            "--innodb-flush-log-at-trx-commit=0",
            "--skip-log-bin",
            "--performance-schema=OFF",
            "--max-connections=50",
            "--max-allowed-packet=16M",
        ]
        self._daemons.spawn("mariadbd", ["mariadbd", *own, *options])

    def _start_slurmdbd(self) -> None:
        if not self.settings.accounting or self._daemons.pid("slurmdbd"):
            return
        sql = ["mariadb", "--no-defaults", "-uroot", "-S", self.settings.mysql_socket, "-e"]
        answers = [*sql, "select 1"]
        self._daemons.wait_ready("mariadbd", lambda: succeeds(answers, self._environ), 60)
        run([*sql, conf.mysql_setup()], self._environ)
        self._daemons.spawn("slurmdbd", [*_as("slurm"), "slurmdbd", "-D"])
        asks = ["sacctmgr", "-nP", "show", "cluster"]
        self._daemons.wait_ready("slurmdbd", lambda: succeeds(asks, self._environ), 60)
        self._account("cluster", conf.CLUSTER)
        self._account("account", conf.ACCOUNT)
        for user in ("root", self.settings.user):
            self._account("user", user, f"account={conf.ACCOUNT}")

    def _account(self, kind: str, name: str, *more: str) -> None:
        """Make a record in the accounting data base, unless it is there."""
        shown = run(["sacctmgr", "-nP", "show", kind, f"format={kind}"], self._environ)
        if kind == "user":
            # root is a user from the beginning, but without the right to submit.
            asked = ["sacctmgr", "-nP", "show", "assoc", f"user={name}", "format=user"]
            shown = run(asked, self._environ)
        if name not in shown.split():
            run(["sacctmgr", "-i", "-Q", "add", kind, name, *more], self._environ)

    def _start_slurmctld(self) -> None:
        if self._daemons.pid("slurmctld"):
            return
        self._daemons.spawn("slurmctld", ["slurmctld", "-D", "-f", self.settings.conf])
        self._daemons.wait_ready("slurmctld", self._controller_answers, 40)

    def _controller_answers(self) -> bool:
        try:
            return "is UP" in run(["scontrol", "ping"], self._environ, within_s=10)
        except ClusterError:
            return False

    def _start_node(self, node: str) -> None:
        if self._daemons.pid(_daemon(node)):
            return
        (self.settings.run / f"slurmd.{node}.self.pid").unlink(missing_ok=True)
        self._daemons.spawn(
            _daemon(node),
            [
                *("nsenter", f"--net=/run/netns/{self._network.namespace(node)}"),
                *("unshare", "--uts", "--mount", "--pid", "--fork"),
                *("--kill-child=KILL", "--mount-proc"),
                *("bash", Path(__file__).with_name("node_init.sh"), node, self.settings.state),
            ],
        )

    def _stop_node(self, node: str) -> None:
        # unshare kills process 1 of the node when it dies, and the kernel then all others.
        init = self._node_init(node) if self._daemons.pid(_daemon(node)) else None
        self._daemons.halt(_daemon(node), signal.SIGKILL, within_s=5)
        if init is not None:
            wait_until(lambda: start_time(init) is None, f"{node} to be off", 10)

    def _node_init(self, node: str) -> int:
        """The host's number of process 1 of a node."""
        outer = self._daemons.pid(_daemon(node))
        deadline = time.monotonic() + 5
        while outer is not None and time.monotonic() < deadline:
            children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
            if children:
                return int(children[0])
            time.sleep(0.01)
        raise ClusterError(f"{node} is off: boot it first")

    def _set_conf(self, lines: Sequence[str]) -> None:
        self.settings.extra_conf.write_text(conf.EXTRA_CONF + "".join(f"{n}\n" for n in lines))
        try:
            run(["scontrol", "reconfigure"], self._environ)
        except ClusterError:
            self.settings.extra_conf.write_text(conf.EXTRA_CONF)
            raise

    def _no_jobs(self) -> bool:
        """Whether there are no jobs left; ends those that are."""
        said = run(["squeue", "-h", "-a", "-o", "%A %T"], self._environ).splitlines()
        alive = {line.split()[0] for line in said if line.split()[1] != "COMPLETING"}
        if not alive:
            return not said
        # At once, not after KillWait; then for good, since a killed job may have been requeued.
        for words in (["--signal=KILL", "--full", "--state=RUNNING"], []):
            succeeds(["scancel", *words, *sorted(alive)], self._environ)
        return False

    def _node_states(self) -> dict[str, str]:
        """Each node's state in sinfo's short form, with its marks: `idle*` is not `idle`."""
        said = run(["sinfo", "-h", "-N", "-p", "high", "-o", "%N %t"], self._environ)
        return {line.split()[0]: line.split()[1] for line in said.splitlines()}

    def _nodes_not_in(self, states: set[str]) -> list[str]:
        return [node for node, state in self._node_states().items() if state not in states]

    def _resumed(self, states: set[str], node: str | None = None) -> bool:
        """Whether the node, or all, are in one of `states`; resumes those that are down."""
        waiting = [n for n in self._nodes_not_in(states) if node in (None, n)]
        for name in waiting:
            if self._node_states()[name].startswith(("down", "drain", "drng", "fail")):
                resume = ["scontrol", "update", f"nodename={name}", "state=resume"]
                succeeds(resume, self._environ)
        return not waiting

    @contextmanager
    def _locked(self) -> Generator[None]:
        """One at a time starts, stops or clears a cluster."""
        with (self.settings.state / "lock").open("w") as lock:
            deadline = time.monotonic() + 300
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise ClusterError("another start, stop or clear takes too long") from None
                    time.sleep(0.1)
            yield


def _daemon(node: str) -> str:
    return f"node.{node}"


def _known(daemon: str) -> str:
    if daemon not in DAEMONS:
        raise ClusterError(f"no daemon {daemon}: there are {' and '.join(DAEMONS)}")
    return daemon


def _as(user: str) -> list[str]:
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]


def _home(user: str) -> str | None:
    """The user's home directory; None if there is no such user."""
    try:
        return pwd.getpwnam(user).pw_dir
    except KeyError:
        return None


def _host() -> str:
    """The machine's own name, as Slurm takes it."""
    return socket.gethostname().partition(".")[0]


def _pid_space(pid: int | str) -> str:
    """The name of the process name space that a process lives in."""
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _own_number(process: Path) -> int:
    """A process's number in its own name space."""
    for line in (process / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    raise ProcessLookupError(process)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _make_device(path: Path) -> None:
    """A clone of /dev/null; an empty file where devices are not allowed serves as well."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        path.touch()
    path.chmod(0o666)


def why_impossible() -> str | None:
    """What forbids a cluster on this machine; None if nothing is known to."""
    if os.geteuid() != 0:
        return "the cluster needs root: it makes name spaces and starts other users' processes"
    if shutil.which("dpkg-query") is None:
        return "the cluster is made of Debian's packages, and there is no dpkg here"
    try:
        probe = ["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "true"]
        run(probe, dict(os.environ))
    except ClusterError as err:
        return f"the cluster needs name spaces for network, host name, mounts and processes: {err}"
    return None
