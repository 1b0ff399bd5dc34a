"""vitra as somebody other than root has it: installed in a virtual environment that all can read.

The environment that runs the tests may lie, as the checkout and even the interpreter, in root's
home, which no other user may enter; and installing torch a second time takes minutes.
"""

from __future__ import annotations

import compileall
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

AsUser = Callable[[Sequence[str | Path]], subprocess.CompletedProcess[str]]

_OURS = ("launcher", "trainer")
_COMMAND = """\
#!{python}
import sys
from launcher.cli import main
sys.exit(main())
"""


def make_user_venv(directory: Path, as_user: AsUser) -> None:
    """Make `directory` a virtual environment with vitra and all that it needs.

    What is installed here is linked file by file, or copied onto another file system; that is kept
    until something else is installed here. vitra itself is copied anew from where the tests import
    it, and becomes an ordinary installed package.

    Args:
        directory: every directory above it must be open to all.
        as_user: runs a command as the user who has to be able to use the environment.
    """
    here, python = Path(sysconfig.get_path("purelib")), _interpreter(as_user)
    made_of = f"{here} {here.stat().st_mtime_ns} {python}"
    stamp = directory / "made-of"
    if not stamp.exists() or stamp.read_text() != made_of:
        shutil.rmtree(directory, ignore_errors=True)
        subprocess.run([python, "-m", "venv", "--without-pip", directory], check=True)
        (site,) = directory.glob("lib/python*/site-packages")
        shutil.copytree(
            here, site, copy_function=_link_or_copy, ignore=_editable, dirs_exist_ok=True
        )
        stamp.write_text(made_of)
    _install_vitra(directory)
    probe = [directory / "bin" / "python", "-P", "-c", "import launcher.cli, trainer, numpy, ssl"]
    answer = as_user(probe)
    assert answer.returncode == 0, f"the user cannot use {directory}: {answer.stderr}"


def _install_vitra(directory: Path) -> None:
    """Put our packages and our command there, as pip does."""
    (site,) = directory.glob("lib/python*/site-packages")
    files: list[Path] = []
    for name in _OURS:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        shutil.rmtree(site / name, ignore_errors=True)
        without_bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(spec.origin).parent, site / name, ignore=without_bytecode)
        files += [file for file in sorted((site / name).rglob("*")) if file.is_file()]
        # The user may not write it there.
        compileall.compile_dir(site / name, quiet=1)
    (info,) = site.glob("vitra_launcher-*.dist-info")
    (info / "RECORD").write_text("".join(f"{file.relative_to(site)},,\n" for file in files))
    command = directory / "bin" / "vitra"
    command.write_text(_COMMAND.format(python=directory / "bin" / "python"))
    command.chmod(0o755)


def _interpreter(as_user: AsUser) -> Path:
    """A Python that the user can run and that fits what is installed here.

    This one where possible; else the system's, if it has the same minor version.
    """
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    here = Path(sys.base_prefix) / "bin" / f"python{version}"
    system = Path("/usr/bin") / f"python{version}"
    for python in (here, system):
        if as_user([python, "-c", ""]).returncode == 0:
            return python
    raise AssertionError(
        f"users other than root cannot run {here}, and there is no {system}: run the tests with a "
        "Python that lies outside root's home"
    )


def _link_or_copy(source: str, target: str) -> None:
    """A hard link: nothing is copied, and removing it later removes nothing else."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def _editable(directory: str, names: list[str]) -> set[str]:
    """What makes vitra an editable install, which the user's is not."""
    if Path(directory).name.startswith("vitra_launcher-"):
        return {"RECORD", "direct_url.json"}
    return {name for name in names if name.startswith("__editable__")}
