"""What is refused costs one clear line and the right exit code, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import Vitra, run_python, tiny_spec, tree, vitra_command

MAY_MOUNT = bool(shutil.which("unshare")) and not subprocess.call(
    ["unshare", "-m", "true"], stderr=subprocess.DEVNULL
)

BAD_SPECS = {
    "no name": (tiny_spec(name=None), "name"),
    "unknown key": (tiny_spec(resources__gpus_per_nod=2), "resources.gpus_per_nod: unknown key"),
    "wrong type": (tiny_spec(train__max_steps="many"), "train.max_steps"),
    "batch that cannot be split": (tiny_spec(train__global_batch_size=9), "global_batch_size"),
    "no YAML": ("name: [", "spec.yaml:"),
    "empty": ("", "spec.yaml"),
    "secret": (tiny_spec(resources__env={"API_KEY": "abc"}), "API_KEY"),
}


@pytest.mark.parametrize(("text", "named"), BAD_SPECS.values(), ids=BAD_SPECS.keys())
def test_bad_spec(vitra: Vitra, text: str, named: str) -> None:
    vitra.spec(text)
    answer = vitra("submit", "spec.yaml", "--local", code=2)
    assert named in answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert [p.name for p in vitra.directory.iterdir()] == ["spec.yaml"]
    assert vitra("submit", "spec.yaml", "--dry-run", code=2).stderr == answer.stderr


def test_all_faults_at_once_one_a_line(vitra: Vitra) -> None:
    vitra.spec(train__learning_rate=-1, resources__nodes=0, checkpoint__keep_last=1)
    lines = vitra("plan", "spec.yaml", code=2).stderr.splitlines()
    assert len(lines) == 3
    assert all(line.startswith("spec.yaml:") for line in lines)


def _refused(vitra: Vitra, *words: str, code: int, named: str) -> str:
    """The one line of a refused submit, which left nothing new."""
    before = tree(vitra.directory)
    answer = vitra("submit", *words, code=code)
    assert answer.stdout == ""
    (line,) = (text for text in answer.stderr.splitlines() if text != "checking data and model")
    assert named in line
    assert tree(vitra.directory).keys() == before.keys()
    return line


def test_missing_spec_file(vitra: Vitra) -> None:
    _refused(vitra, "absent.yaml", "--local", code=2, named="absent.yaml")


def test_no_slurm_here(vitra: Vitra, tmp_path_factory: pytest.TempPathFactory) -> None:
    vitra.spec()
    vitra.environ = {"PATH": str(tmp_path_factory.mktemp("no-commands"))}
    line = _refused(vitra, "spec.yaml", code=3, named="--local")
    assert "--dry-run" in line


REFUSED = {
    "elastic": ({"resources__nodes": {"min": 1, "max": 2}}, "not yet"),
    "memory": ({"checkpoint__uri": "memory://x/{run_id}"}, "a memory of its own"),
    "protocol": ({"checkpoint__uri": "ftp://host/{run_id}"}, "ftp:// cannot hold checkpoints"),
}


@pytest.mark.parametrize(("changes", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_planned_but_not_run(vitra: Vitra, changes: dict[str, object], why: str) -> None:
    vitra.spec(**changes)
    line = _refused(vitra, "spec.yaml", "--local", code=2, named=why)
    assert next(iter(changes)).replace("__", ".") in line
    vitra("plan", "spec.yaml")
    assert vitra("submit", "spec.yaml", "--dry-run", "--json").json["sbatch_script"]


def test_containers_without_slurm(vitra: Vitra) -> None:
    vitra.spec(resources__container={"runtime": "pyxis", "image": "team#vitra:1"})
    line = _refused(vitra, "spec.yaml", "--local", code=2, named="resources.container: --local")
    assert "-o resources.container.runtime=none" in line
    _refused(vitra, "spec.yaml", "--local", "--dry-run", code=2, named="--local starts no")
    assert vitra("plan", "spec.yaml", "--json").json["container"]["image"] == "team#vitra:1"
    off = "resources.container.runtime=none"
    vitra("submit", "spec.yaml", "--local", "--dry-run", "-o", off)


def test_run_root_that_is_a_file(vitra: Vitra) -> None:
    vitra.spec()
    (vitra.directory / "file").write_text("")
    for root in ("file", "file/runs"):
        words = ("spec.yaml", "--local", "--run-root", root)
        _refused(vitra, *words, code=6, named=f"run root {vitra.directory / root}")


def test_run_root_where_nothing_can_be_made(vitra: Vitra) -> None:
    vitra.spec()
    for root in ("/proc", "/proc/runs", "/proc/self/fdinfo/runs/deeper"):
        _refused(vitra, "spec.yaml", "--local", "--run-root", root, code=6, named=root)


@pytest.mark.parametrize("name", ["n" * 300, f"{'d' * 250}/" * 20], ids=["name", "path"])
def test_run_root_that_is_too_long(vitra: Vitra, name: str) -> None:
    vitra.spec()
    words = ("spec.yaml", "--local", "--run-root", name)
    _refused(vitra, *words, code=6, named="File name too long")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user to be")
def test_run_root_of_somebody_else(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    # Not the command itself: another user may not read the files that vitra is installed in.
    said = run_python(
        "import os, pathlib; from launcher import submit; from trainer.spec import errors\n"
        f"os.setuid(65534)\ntry: submit._make_root(pathlib.Path({str(theirs / 'runs')!r}))\n"
        "except errors.StorageError as err: print(err)"
    )
    assert said.startswith(f"run root {theirs}"), said
    assert "Permission denied" in said


@pytest.mark.skipif(not MAY_MOUNT, reason="needs to mount")
def test_run_root_that_is_mounted_read_only(vitra: Vitra, tmp_path: Path) -> None:
    spec, place = vitra.spec(), tmp_path / "place"
    place.mkdir()
    mount = 'mount -t tmpfs -o ro none "$1" && exec "$2" submit "$3" --local --run-root "$1/runs"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", place, vitra_command(), spec],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 6
    assert done.stderr.decode().startswith(f"run root {place}/runs: Read-only file system")


BAD_ROOTS = {
    "new-line": ("a\nb", "control character"),
    "escape": ("a\x1b[2J", "control character"),
    "no UTF-8": (os.fsdecode(b"a\xff"), "not UTF-8"),
    "empty": ("", "--run-root is empty"),
    "nobody's home": ("~nobody-of-that-name/runs", "write the path in full"),
}


@pytest.mark.parametrize(("root", "named"), BAD_ROOTS.values(), ids=BAD_ROOTS.keys())
def test_run_root_that_is_no_sound_path(vitra: Vitra, root: str, named: str) -> None:
    vitra.spec()
    _refused(vitra, "spec.yaml", "--local", "--run-root", root, code=2, named=named)


def test_working_directory_that_is_gone(vitra: Vitra, tmp_path: Path) -> None:
    spec = vitra.spec()
    gone = tmp_path / "gone"
    gone.mkdir()
    said = run_python(
        f"import os, sys; os.chdir({str(gone)!r}); os.rmdir({str(gone)!r})\n"
        f"sys.argv = ['vitra', 'plan', {str(spec)!r}]\n"
        "from launcher.cli import main; main()"
    )
    assert said == "the current directory has been removed; cd to one that exists\n"


def test_checkpoint_place_of_another_run(vitra: Vitra, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "owner.json").write_text('{"run_id": "other-20260101-000000-abcd"}\n')
    vitra.spec(checkpoint__uri=str(place))
    line = _refused(vitra, "spec.yaml", "--local", code=6, named="other-20260101-000000-abcd")
    assert "{run_id}" in line


def test_checkpoint_place_that_cannot_be_written(vitra: Vitra, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for uri in (str(tmp_path / "file"), "/proc/checkpoints"):
        vitra.spec(checkpoint__uri=uri)
        _refused(vitra, "spec.yaml", "--local", code=6, named=uri)


def test_weights_to_start_from_that_are_not_there(vitra: Vitra, tmp_path: Path) -> None:
    place = tmp_path / "absent.safetensors"
    vitra.spec(checkpoint__init_from=str(place))
    _refused(vitra, "spec.yaml", "--local", code=4, named=f"checkpoint.init_from={place}")


OWN_COMPONENTS = """
import os
import sys

def raises(options, *_):
    raise ValueError("two\\nlines")

def leaves(options, *_):
    sys.exit("on its own")

def talks(options, *_):
    print("no new-line at the end", end="")
    os.write(1, b"nor here")
    return object()

no_function = 3
"""


def _components(vitra: Vitra) -> None:
    place = vitra.directory / "components"
    place.mkdir()
    (place / "own.py").write_text(OWN_COMPONENTS)
    (place / "broken.py").write_text("def f(:\n")
    # Written bytecode would be something left behind.
    vitra.environ = {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.slow
def test_own_component_that_raises(vitra: Vitra) -> None:
    _components(vitra)
    vitra.spec(data__kind="own:raises", data__options={})
    line = _refused(vitra, "spec.yaml", "--local", code=2, named="data.kind: 'own:raises'")
    assert "ValueError: two lines" in line
    assert "own.py, line 6" in line


PROBED = {
    "absent module": ("model__kind", "absent_module:f", "absent_module"),
    "absent function": ("model__kind", "own:absent", "absent"),
    "no function": ("model__kind", "own:no_function", "int"),
    "syntax error": ("model__kind", "broken:f", "SyntaxError"),
    "leaves": ("data__kind", "own:leaves", "SystemExit: on its own"),
    "lacks members": ("model__kind", "own:talks", "backbone_prefixes"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("key", "kind", "named"), PROBED.values(), ids=PROBED.keys())
def test_own_component_that_cannot_be_used(vitra: Vitra, key: str, kind: str, named: str) -> None:
    _components(vitra)
    vitra.spec(**{key: kind})
    line = _refused(vitra, "spec.yaml", "--local", code=2, named=named)
    assert key.replace("__", ".") in line


@pytest.mark.slow
def test_missing_and_broken_data(vitra: Vitra, tmp_path: Path) -> None:
    root = tmp_path / "data"
    vitra.spec(data={"kind": "lerobot", "options": {"root": str(root)}})
    _refused(vitra, "spec.yaml", "--local", code=2, named=str(root))
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text("{")
    _refused(vitra, "spec.yaml", "--local", code=2, named="info.json")


@pytest.mark.slow
def test_batch_larger_than_the_data(vitra: Vitra) -> None:
    vitra.spec(train__global_batch_size=128, train__per_device_batch_size=None)
    line = _refused(vitra, "spec.yaml", "--local", code=2, named="global_batch_size")
    assert "128" in line
    assert "64" in line
