"""`plan` and `submit --dry-run`: the documents that scripts read, and that nothing is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import Vitra, run_python, tiny_spec, tree

PLAN_KEYS = {
    "name",
    "strategy",
    "world_size",
    "nodes",
    "tasks_per_node",
    "global_batch_size",
    "per_device_batch_size",
    "grad_accumulation_steps",
    "total_steps",
    "warmup_steps",
    "time_limit_min",
    "checkpoint_uri",
    "elastic",
}


def test_plan_document(vitra: Vitra) -> None:
    vitra.spec(train__warmup_ratio=0.1)
    answer = vitra("plan", "spec.yaml", "--json", "-o", "resources.time=1:30")
    plan = answer.json
    assert plan.keys() >= PLAN_KEYS
    assert answer.stderr == ""
    assert (plan["per_device_batch_size"], plan["world_size"]) == (2, 2)
    assert (plan["grad_accumulation_steps"], plan["global_batch_size"]) == (2, 8)
    assert (plan["total_steps"], plan["warmup_steps"], plan["time_limit_min"]) == (20, 2, 2)
    assert plan["checkpoint_uri"] == str(vitra.directory / "runs" / "tiny-DRYRUN" / "checkpoints")


def test_plan_of_epochs_waits_for_the_data(vitra: Vitra) -> None:
    vitra.spec(train__max_steps=None, train__epochs=2)
    plan = vitra("plan", "spec.yaml", "--json").json
    assert plan["total_steps"] is None
    assert plan["warmup_steps"] is None


def test_plan_of_an_elastic_run(vitra: Vitra) -> None:
    vitra.spec(resources__nodes={"min": 1, "max": 4}, train__per_device_batch_size=None)
    shapes = vitra("plan", "spec.yaml", "--json").json["elastic"]
    assert [shape["nodes"] for shape in shapes] == [1, 2, 4]
    for shape in shapes:
        per_step = shape["per_device_batch_size"] * shape["grad_accumulation_steps"]
        assert per_step * shape["world_size"] == 8


def test_dry_run_document_and_text_show_the_same(vitra: Vitra) -> None:
    vitra.spec()
    words = ("submit", "spec.yaml", "--dry-run")
    answer, text = vitra(*words, "--json"), vitra(*words)
    document = answer.json
    assert document.keys() >= PLAN_KEYS | {"sbatch_script"}
    assert document["run_id"] == "tiny-DRYRUN"
    script = document["sbatch_script"]
    assert script.startswith("#!")
    assert "#SBATCH" in script
    assert text.stdout.endswith(script)
    assert text.stderr == answer.stderr == ""
    assert vitra("plan", "spec.yaml").stdout.strip() in text.stdout


def test_a_dry_run_shows_no_secret(vitra: Vitra) -> None:
    vitra.spec(resources__env={"WANDB_API_KEY": None}, resources__setup=['echo "$WANDB_API_KEY"'])
    for where in ((), ("--local",)):
        words = ("submit", "spec.yaml", "--dry-run", *where)
        for format_ in ((), ("--json",)):
            answer = vitra(*words, *format_, environ={"WANDB_API_KEY": "marker-of-a-secret"})
            assert "marker-of-a-secret" not in answer.stdout + answer.stderr


def test_local_dry_run_shows_the_processes(vitra: Vitra) -> None:
    vitra.spec()
    words = ("submit", "spec.yaml", "--local", "--dry-run")
    text = vitra(*words).stdout
    assert "rank 1" in text
    assert "#SBATCH" not in text
    assert vitra(*words, "--json").json["sbatch_script"] is None
    assert [p.name for p in vitra.directory.iterdir()] == ["spec.yaml"]


#: Prints what Python is about to do to files, sockets and processes, then runs the command.
WATCHED = """
import json, os, sys

TOUCHING = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork",
            "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod",
            "os.truncate", "os.utime", "shutil.", "tempfile.")

def watch(event, args):
    if event.startswith(TOUCHING):
        print("touched", event, args, file=sys.stderr)
    elif event == "open" and isinstance(args[2], int):
        if args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
            print("touched", event, args, file=sys.stderr)

words = json.loads(os.environ.pop("WORDS"))
sys.argv = ["vitra", *words]
os.chdir(os.environ.pop("DIRECTORY"))
from launcher.cli import main
sys.addaudithook(watch)
main()
"""


@pytest.mark.parametrize("words", [["plan"], ["submit", "--dry-run"]], ids=["plan", "dry-run"])
def test_touches_nothing_and_needs_nothing(tmp_path: Path, words: list[str]) -> None:
    """No file written, no socket opened, no program started; in an empty place, without a PATH."""
    spec, empty = tmp_path / "spec.yaml", tmp_path / "empty"
    spec.write_text(tiny_spec(checkpoint__uri="s3://bucket/{name}", resources__setup=["true"]))
    empty.mkdir(mode=0o500)
    before = tree(tmp_path)
    environ = {
        "WORDS": json.dumps([*words, str(spec), "--json"]),
        "DIRECTORY": str(empty),
        "PATH": "",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    said = run_python(WATCHED, environ)
    assert "touched" not in said, said
    assert json.loads(said)["name"] == "tiny"
    assert tree(tmp_path) == before


def test_the_watch_sees_what_is_touched(tmp_path: Path) -> None:
    """The test above can fail: a submit does write, before it is refused."""
    spec = tmp_path / "spec.yaml"
    spec.write_text(tiny_spec(checkpoint__uri=str(spec)))
    environ = {"WORDS": json.dumps(["submit", str(spec), "--local"]), "DIRECTORY": str(tmp_path)}
    said = run_python(WATCHED, environ)
    assert "touched os.mkdir" in said
    assert "is not a directory" in said or "File exists" in said or "Not a directory" in said


HOSTILE_ROOTS = (
    "my run",
    "it's",
    'a"=0"',
    "a%jb",
    "a$HOME",
    "a`id`b",
    "$(touch owned)",
    "täst 日本",
    "-J",
    "null",
    "a;b&c|d",
)


@pytest.mark.parametrize("root", HOSTILE_ROOTS)
def test_hostile_run_root_is_taken_literally_or_refused(vitra: Vitra, root: str) -> None:
    vitra.spec()
    words = ("spec.yaml", "--run-root", f"./{root}", "--json")
    plan = vitra("plan", *words).json
    run_dir = vitra.directory / root / "tiny-DRYRUN"
    assert plan["checkpoint_uri"] == str(run_dir / "checkpoints")
    # What sbatch makes of the script is tested where the script is made.
    answer = vitra("submit", "--dry-run", *words, code=None)
    assert answer.code == 0 or (answer.code == 2 and len(answer.stderr.splitlines()) == 1)
    assert [p.name for p in vitra.directory.iterdir()] == ["spec.yaml"]


def test_name_that_is_no_name(vitra: Vitra) -> None:
    for name in ("my run", "../up", "a`id`b", "x" * 65, "täst", "a\n#SBATCH --time=1"):
        vitra.spec(name=name)
        lines = vitra("submit", "spec.yaml", "--dry-run", code=2).stderr.splitlines()
        assert len(lines) == 1
        assert "name" in lines[0]
