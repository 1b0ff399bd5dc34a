"""Images without a registry, and the commands that build and run them on a machine like CI's.

`python -m tests.containers.images DIRECTORY` makes everything the tests here need in a directory of
its own, so that it can go on beside other things, and then holds it until it is ended: nothing is
left behind then. As root, on Debian 12.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

PACKAGES = (
    *("buildah", "podman", "runc", "mmdebstrap", "uidmap", "netavark", "aardvark-dns"),
    *("charliecloud", "podman-compose"),
)
CHECKOUT = Path(__file__).parents[2]
BASE = "docker.io/library/python:3.11-slim-bookworm"
TRAINER = "localhost/vitra:cpu"
#: What compose.yaml calls the image of a host of its cluster.
HOST = "localhost/vitra-cluster"
#: An image is built within minutes; one that takes longer waits for a network that is not there.
BUILD_WITHIN_S = 900.0
#: A test that waits for the images first.
TEST_WITHIN_S = BUILD_WITHIN_S + 300.0

_PACKAGES_LOCK = Path("/run/lock/vitra-cluster-packages")

# The runtime and the control groups of a machine that is itself a container; and no more open files
# and processes than such a machine may hand on.
_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
[network]
network_config_dir = "{directory}/networks"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{directory}/graph"
runroot = "{directory}/run"
"""
#: What of pip's settings says where packages come from, and how they are reached.
_PIP_SETTINGS = ("cert", "find-links", "index-url", "extra-index-url", "constraint", "timeout")


class Images:
    """Images and containers that lie in one directory, and nowhere else."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def environ(self) -> dict[str, str]:
        """For podman, buildah and what calls them."""
        return {
            **os.environ,
            "CONTAINERS_CONF": str(self.directory / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(self.directory / "storage.conf"),
            "TMPDIR": str(self.directory / "tmp"),
            # Charliecloud asks for it.
            "USER": os.environ.get("USER", "root"),
        }

    @property
    def unpacked(self) -> Path:
        """The trainer's image as Charliecloud wants it: a directory, for all nodes to see."""
        return self.directory / "trainer"

    def prepare(self) -> None:
        """Make everything; what is there already stays, built images are built again if need be."""
        (self.directory / "tmp").mkdir(parents=True, exist_ok=True)
        (self.directory / "containers.conf").write_text(
            _CONTAINERS_CONF.format(directory=self.directory)
        )
        (self.directory / "storage.conf").write_text(_STORAGE_CONF.format(directory=self.directory))
        self._install_missing()
        if not self.has(BASE):
            self.run(["bash", str(Path(__file__).with_name("base.sh")), BASE])
        self._build(TRAINER)
        self._unpack()
        self._build(HOST, "--target=cluster")

    def _unpack(self) -> None:
        """Do what ch-convert does, in seconds and not in minutes: without an archive in between."""
        if self.unpacked.exists():
            shutil.rmtree(self.unpacked)
        self.unpacked.mkdir()
        container = self.run(["podman", "create", TRAINER]).stdout.strip()
        unpack = 'podman export "$1" | tar -x -C "$2"'
        self.run(["bash", "-o", "pipefail", "-c", unpack, "-", container, str(self.unpacked)])
        self.run(["podman", "rm", container])
        (config,) = json.loads(self.run(["podman", "image", "inspect", TRAINER]).stdout)
        (self.unpacked / "ch").mkdir()
        environ = "".join(f"{variable}\n" for variable in config["Config"]["Env"])
        (self.unpacked / "ch" / "environment").write_text(environ)

    def outcome(self) -> str | None:
        """What `prepare` in another process came to: "" is success; None while it goes on."""
        file = self.directory / "outcome"
        return file.read_text() if file.exists() else None

    def conclude(self, fault: str) -> None:
        """Say so to those who wait."""
        self.directory.mkdir(parents=True, exist_ok=True)
        scratch = self.directory / "outcome.new"
        scratch.write_text(fault)
        scratch.rename(self.directory / "outcome")

    def _install_missing(self) -> None:
        query = ["dpkg-query", "-W", "-f=${db:Status-Status}"]
        with _PACKAGES_LOCK.open("w") as lock:
            # A test cluster that starts meanwhile installs packages as well, under the same lock.
            fcntl.flock(lock, fcntl.LOCK_EX)
            missing = [
                package
                for package in PACKAGES
                if self.run([*query, package], code=None).stdout != "installed"
            ]
            if missing:
                apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
                quiet = {"DEBIAN_FRONTEND": "noninteractive"}
                self.run([*apt, "update"], environ=quiet)
                install = [*apt, "-y", "--no-install-recommends", "install", *missing]
                self.run(install, environ=quiet, within_s=600)

    def _build(self, tag: str, *options: str) -> None:
        """Build the checkout's Dockerfile, with what this machine's pip is told, as it is told."""
        settings = pip_settings()
        file = self.directory / "pip.conf"
        lines = [f"{name} = {' '.join(words)}" for name, words in settings.items()]
        file.write_text("\n".join(["[global]", *lines, ""]))
        places = {path for words in settings.values() for path in map(_place, words) if path}
        volumes = [f"--volume={path}:{path}:ro" for path in sorted(places)]
        self.run(
            [
                *("buildah", "bud", "--pull-never", "--isolation=chroot", "--layers"),
                *("--format=docker", f"--file={CHECKOUT / 'docker' / 'Dockerfile'}"),
                *(f"--tag={tag}", "--build-arg=CPU_INDEX=", f"--volume={file}:/etc/pip.conf:ro"),
                *(*volumes, *options, str(CHECKOUT)),
            ],
            within_s=BUILD_WITHIN_S,
        )

    def has(self, image: str) -> bool:
        return self.run(["podman", "image", "exists", image], code=None).returncode == 0

    def run(
        self,
        argv: Sequence[str],
        *,
        environ: Mapping[str, str] | None = None,
        code: int | None = 0,
        within_s: float = 300.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to the end; fails unless it exits with `code` (None: any) in time."""
        done = subprocess.run(
            argv,
            env={**self.environ, **(environ or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert code is None or done.returncode == code, (
            f"{' '.join(argv)}: exit code {done.returncode}\n"
            f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        )
        return done

    def remove(self) -> None:
        """Remove the directory with all that was ever in it."""
        self.run(["podman", "rm", "--all", "--force", "--time=2"], code=None)
        self.run(["podman", "system", "reset", "--force"], code=None)
        # Whatever a build that was broken off has mounted there is not to be removed with it.
        for mount in reversed(Path("/proc/self/mounts").read_text().splitlines()):
            place = mount.split()[1]
            if Path(place).is_relative_to(self.directory):
                self.run(["umount", "--lazy", place])
        shutil.rmtree(self.directory)


def pip_settings() -> dict[str, list[str]]:
    """Where this machine's pip gets packages from: each setting's words, by its name."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
    found: dict[str, list[str]] = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in _PIP_SETTINGS:
            # A variable counts for more than a file, and comes first.
            found.setdefault(name, value.strip("'\"").replace("\\n", " ").split())
    return found


def _place(word: str) -> str | None:
    """The file or directory that a word of a setting names, with all that belongs to it."""
    path = word.removeprefix("file://")
    if not path.startswith("/") or not Path(path).exists():
        return None
    # A package index refers to its files beside it.
    return path.removesuffix("/simple")


def main() -> NoReturn:
    (directory,) = sys.argv[1:]
    images = Images(Path(directory))
    # Whoever has started this ends it, early or late.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        try:
            images.prepare()
        except (AssertionError, OSError, subprocess.SubprocessError) as err:
            images.conclude(str(err) or type(err).__name__)
        else:
            images.conclude("")
        while True:
            signal.pause()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        images.remove()


if __name__ == "__main__":
    main()
