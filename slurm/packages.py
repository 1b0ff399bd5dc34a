"""Debian's packages of Slurm, installed where they are missing."""

from __future__ import annotations

import fcntl
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from slurm.processes import run
from slurm.settings import ClusterError, Settings

_POLICY = Path("/usr/sbin/policy-rc.d")
_LOCK = Path("/run/lock/vitra-cluster-packages")
_INSTALL_WITHIN_S = 1200.0


def install_missing(settings: Settings, say: Callable[[str], None]) -> None:
    """Returns with all that the cluster needs installed, and no service started by that.

    Raises:
        ClusterError: a package cannot be had.
    """
    if not _missing(settings):
        return
    with _LOCK.open("w") as lock:
        # Two clusters that start at once share one installation.
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = _missing(settings)
        if not missing:
            return
        say(f"installing {' '.join(missing)}")
        environ = {**settings.daemon_environ, "DEBIAN_FRONTEND": "noninteractive"}
        apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=600"]
        log = settings.log / "apt.log"
        with _no_service_starts():
            run([*apt, "update"], environ, within_s=_INSTALL_WITHIN_S, log=log)
            run(
                [*apt, "-y", "--no-install-recommends", "install", *missing],
                environ,
                within_s=_INSTALL_WITHIN_S,
                log=log,
            )


def _missing(settings: Settings) -> list[str]:
    wanted = ["munge", "slurmctld", "slurmd", "slurm-client", "iproute2"]
    if settings.accounting:
        wanted += ["slurmdbd", "mariadb-server"]
    return [package for package in wanted if not _installed(package, settings)]


def _installed(package: str, settings: Settings) -> bool:
    query = ["dpkg-query", "-W", "-f=${db:Status-Status}", package]
    try:
        return run(query, settings.daemon_environ) == "installed"
    except ClusterError:
        return False


@contextmanager
def _no_service_starts() -> Generator[None]:
    """Packages start their services when they are installed, unless this file says no."""
    if _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink()
