"""vitra as it is given away: a wheel, and an environment that has nothing else of this checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S

CHECKOUT = Path(__file__).parents[1]


def tracked_files(*directories: str) -> list[str]:
    """What git has of the checkout, or of directories in it, as far as it is still there."""
    # The checkout may be somebody else's, as where its tests run in a container.
    git = ["git", "-c", f"safe.directory={CHECKOUT}", "-C", str(CHECKOUT)]
    done = subprocess.run(
        [*git, "ls-files", "-z", "--", *directories], stdout=subprocess.PIPE, check=True
    )
    names = done.stdout.decode().rstrip("\0").split("\0")
    return [name for name in names if (CHECKOUT / name).is_file()]


def build_wheel(directory: Path) -> Path:
    """Build the wheel of all that is tracked, as it is at the moment, in `directory`."""
    source = directory / "source"
    for name in tracked_files():
        target = source / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(CHECKOUT / name, target)
    # Without isolation it takes setuptools from here, where torch needs it anyway, and no network.
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory]
    run_to_end([*build, source])
    (wheel,) = directory.glob("*.whl")
    return wheel


def install(wheel: Path, directory: Path) -> Path:
    """Make `directory` an environment of the wheel's; returns its bin directory.

    What vitra needs is borrowed from the environment of the tests: torch alone takes minutes to
    download. Of what lies there only packages are found, for of a path in a .pth no .pth is read;
    so the tests' own editable install does not count.
    """
    run_to_end([sys.executable, "-m", "venv", "--without-pip", directory])
    python = directory / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check"]
    run_to_end([*pip, "install", "--quiet", "--no-deps", "--no-index", wheel])
    (site,) = directory.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return directory / "bin"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def run_to_end(
    argv: Sequence[str | Path],
    *,
    environ: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a command that has to succeed; returns what it printed. By default without PYTHONPATH."""
    if environ is None:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        argv,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, f"{argv}: {done.stdout}"
    return done.stdout
