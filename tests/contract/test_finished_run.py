"""One run trained to its end, looked at from every side, and copies of it that were damaged."""

from __future__ import annotations

import re
import shlex
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from launcher.lock import RunLock
from tests.conftest import Answer, Vitra, VitraServer, tiny_spec, tree, vitra_command
from tests.terminal import on_terminal
from trainer.spec.rundir import RunDir, read_lines

pytestmark = pytest.mark.slow

#: Everything that a shell, a format string or a path could trip over.
HOSTILE_ROOT = """my runs' "=0" 100% $HOME `id` $(id) täst 日本 {name}"""

#: Left in the shell by another launcher or allocation; each would send ranks looking for strangers.
STALE = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "203.0.113.1",
    "MASTER_PORT": "1",
    "VITRA_RUN_ID": "another",
    "VITRA_ATTEMPT": "9",
    "VITRA_PARENT_PID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "3",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NUM_NODES": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "OMP_NUM_THREADS": "77",
}
SECRETS = {
    "WANDB_API_KEY": "secret-marker-1f2e3d",
    "AWS_SECRET_ACCESS_KEY": "secret-marker-4c5b6a",
    "AWS_ACCESS_KEY_ID": "secret-marker-7a8b9c",
}

OUTPUT_KEYS = {"run_id", "run_dir", "job_id"}
STATUS_KEYS = {
    *OUTPUT_KEYS,
    "name",
    "state",
    "attempt",
    "step",
    "total_steps",
    "last_checkpoint_step",
    "attempts",
    "goodput",
}
ATTEMPT_KEYS = {
    "attempt",
    "job_id",
    "verdict",
    "exit_code",
    "failed_rank",
    "failed_node",
    "first_step",
    "last_step",
    "started_at",
    "ended_at",
}


@dataclass(frozen=True)
class Finished:
    vitra: Vitra
    answer: Answer
    path: Path
    text: str

    @property
    def run_id(self) -> str:
        return self.path.name


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, vitra_server: VitraServer) -> Finished:
    vitra = Vitra(tmp_path_factory.mktemp("finished"), vitra_server)
    text = "# a comment that is kept\n" + tiny_spec(run_root=HOSTILE_ROOT, train__max_steps=99)
    vitra.spec(text)
    answer = vitra(
        *("submit", "spec.yaml", "--local", "--json"),
        *("-o", "train.max_steps=20", "-o", "tracking.sample_ids=true"),
        environ=STALE | SECRETS,
    )
    return Finished(vitra, answer, Path(answer.json["run_dir"]), text)


@pytest.fixture
def copied(finished: Finished, vitra: Vitra) -> tuple[Vitra, Path]:
    """A copy of the run in another place: the run of that place, to be tampered with."""
    path = vitra.directory / "runs" / finished.run_id
    shutil.copytree(finished.path, path)
    return vitra, path


def test_submit_prints_one_document(finished: Finished) -> None:
    document = finished.answer.json
    assert document.keys() >= OUTPUT_KEYS
    assert document["job_id"] is None
    assert document["run_id"] == finished.path.name
    assert finished.path.parent == finished.vitra.directory / HOSTILE_ROOT
    assert finished.path.is_dir()


def test_progress_goes_to_stderr(finished: Finished) -> None:
    said = finished.answer.stderr
    assert "attempt 1: 2 ranks, batch 2 x 2 x 2 = 8, from the beginning" in said
    assert "step 20/20" in said
    assert "completed: all 2 ranks reached step 20" in said


def test_what_is_printed_to_type_next_works(finished: Finished) -> None:
    said = finished.answer.stderr
    commands = [line.partition("   ")[0] for line in said.partition("next: ")[2].split("\n      ")]
    assert len(commands) == 3
    for text in commands:
        name, *words = shlex.split(text)
        assert name == "vitra"
        if words[0] != "resume":
            assert finished.run_id in finished.vitra(*words).stdout
    resume = ["vitra", "resume", str(finished.path), "-o", "train.max_steps=N"]
    assert shlex.split(commands[2]) == resume


def test_on_a_narrow_terminal_no_word_is_torn(finished: Finished) -> None:
    for words in (["status", str(finished.path)], ["ps", "--run-root", str(finished.path.parent)]):
        said = on_terminal([vitra_command(), *words], columns=40, cwd=finished.vitra.directory)
        known = {
            word for line in finished.vitra(*words).stdout.splitlines() for word in line.split()
        }
        shown = [line for line in said.splitlines() if not line.startswith("loss ")]
        assert len(shown) > 1
        assert all(len(line) <= 40 or len(line.split()) <= 2 for line in shown), said
        if words[0] == "status":
            assert {word for line in shown for word in line.split()} <= known
        assert finished.run_id in said
        assert "\x1b" not in said


def test_labels_of_ranks_have_colours_where_they_are_wanted(finished: Finished) -> None:
    def logs(**environ: str) -> str:
        command = [vitra_command(), "logs", str(finished.path)]
        return on_terminal(command, columns=80, cwd=finished.vitra.directory, environ=environ)

    plain = finished.vitra("logs", finished.path).stdout
    assert "\x1b" not in plain
    coloured = logs()
    for rank in range(2):
        assert len(set(re.findall(rf"\x1b\[(\d+)m\[1/{rank}\]\x1b\[0m ", coloured))) == 1
    assert re.sub(r"\x1b\[\d+m", "", coloured) == plain
    assert logs(NO_COLOR="1") == logs(TERM="dumb") == plain


def test_status_document(finished: Finished) -> None:
    answer = finished.vitra("status", finished.path, "--json")
    status = answer.json
    assert answer.stderr == ""
    assert status.keys() >= STATUS_KEYS
    assert (status["state"], status["attempt"], status["job_id"]) == ("completed", 1, None)
    assert (status["step"], status["total_steps"]) == (20, 20)
    assert status["last_checkpoint_step"] == 20
    (attempt,) = status["attempts"]
    assert attempt.keys() >= ATTEMPT_KEYS
    assert (attempt["verdict"], attempt["exit_code"]) == ("completed", 0)
    assert (attempt["first_step"], attempt["last_step"]) == (1, 20)
    assert attempt["failed_rank"] is None
    assert attempt["started_at"] < attempt["ended_at"]


def test_where_the_time_went(finished: Finished) -> None:
    status = finished.vitra("status", finished.path, "--json").json
    wall_s, ratio = (status["goodput"].pop(name) for name in ("wall_s", "ratio"))
    spent = status["goodput"]
    assert sum(spent.values()) == pytest.approx(wall_s, rel=0.01)
    metrics = list(read_lines(RunDir(finished.path).metrics))
    # Two processes' clocks: the ranks say what a step took, the supervisor sees when they begin.
    assert spent["training_s"] <= sum(record["step_time_s"] for record in metrics) + 0.01
    assert ratio == pytest.approx(spent["training_s"] / wall_s, abs=1e-3)
    assert spent["starting_s"] > 0 < spent["training_s"]
    assert (spent["queued_s"], spent["restoring_s"]) == (0, 0)


def test_the_world_is_the_spec_s(finished: Finished) -> None:
    """And not that of the variables which the shell still had."""
    events = list(read_lines(RunDir(finished.path).events))
    (started,) = (e for e in events if e["event"] == "started")
    assert started["world_size"] == 2
    for rank in range(2):
        ids = list(read_lines(RunDir(finished.path).samples(rank)))
        assert [line["step"] for line in ids] == list(range(1, 21))
        assert all(len(line["ids"]) == 4 for line in ids)
    assert len(RunDir(finished.path).sample_files()) == 2


def test_metrics_are_whole(finished: Finished) -> None:
    records = list(read_lines(RunDir(finished.path).metrics))
    assert [r["step"] for r in records] == list(range(1, 21))
    wanted = {"step", "epoch", "loss", "lr", "grad_norm", "step_time_s", "samples_seen", "attempt"}
    assert all(r.keys() >= wanted for r in records)
    assert records[-1]["samples_seen"] == 160


def test_run_directory(finished: Finished) -> None:
    path = finished.path
    assert (path / "spec.yaml").read_text() == finished.text
    overrides = yaml.safe_load((path / "overrides.yaml").read_text())
    assert overrides == ["train.max_steps=20", "tracking.sample_ids=true"]
    for name in ("run.json", "plan.json", "events.jsonl", "metrics.jsonl"):
        assert (path / name).is_file(), name
    attempt = path / "attempts" / "1"
    names = ("plan.json", "outcome.json", "metrics.jsonl", "supervisor.log")
    for name in (*names, "rank_0.exit", "rank_1.exit", "logs/rank_0.log", "logs/rank_1.log"):
        assert (attempt / name).is_file(), name
    leftovers = [p for p in path.rglob("*") if p.name.startswith(".")]
    assert leftovers == []


def test_nobody_else_may_look(finished: Finished) -> None:
    assert stat.S_IMODE(finished.path.stat().st_mode) == 0o750
    for path in finished.path.rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o027 == 0, path


def test_secrets_are_written_nowhere(finished: Finished) -> None:
    for secret in SECRETS.values():
        assert secret not in finished.answer.stdout + finished.answer.stderr
        for path in finished.path.rglob("*"):
            assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_checkpoints_document(finished: Finished) -> None:
    answer = finished.vitra("checkpoints", finished.path, "--json", "--verify")
    document = answer.json
    assert answer.stderr == ""
    assert [one["step"] for one in document["complete"]] == [20, 15]
    assert all(one["verified"] for one in document["complete"])
    assert document["run_id"] == finished.run_id
    by_place = finished.vitra("checkpoints", document["uri"], "--json").json
    assert [one["step"] for one in by_place["complete"]] == [20, 15]


def changed_by(vitra: Vitra, path: Path, *words: str, code: int) -> tuple[Answer, set[str]]:
    """The answer to a command and the files below `path` that it changed, the lock file apart."""
    before = tree(path)
    answer = vitra(*words, code=code)
    after = tree(path)
    changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    return answer, changed - {"supervisor.lock"}


def test_resume_of_a_finished_run_does_nothing(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    answer, changed = changed_by(vitra, path, "resume", "tiny", "--json", code=0)
    assert changed == set()
    assert answer.json["run_id"] == path.name
    assert "already complete" in answer.stderr
    _, changed = changed_by(vitra, path, "resume", "tiny", "-o", "train.max_steps=10", code=0)
    assert changed == set()


def test_the_submitted_copy_counts_not_the_file(finished: Finished) -> None:
    """What becomes of the user's own file later is of no interest."""
    finished.vitra.spec("no: [spec")
    answer = finished.vitra("resume", finished.path)
    assert "already complete: step 20 of 20" in answer.stderr
    finished.vitra("status", finished.path)


REFUSED_CHANGES = {
    "learning rate": (("-o", "train.learning_rate=2e-3"), "train.learning_rate: 0.001 -> 0.002"),
    "seed": (("-o", "seed=7"), "seed: 42 -> 7"),
    "batch": (("-o", "train.global_batch_size=16"), "train.global_batch_size: 8 -> 16"),
    "data": (("-o", "data.options.samples=80"), "data.options.samples: 64 -> 80"),
    "model": (("-o", "model.options.dim=64"), "model.options.dim: 32 -> 64"),
    "both": (("-o", "seed=7", "-o", "train.max_steps=30"), "seed: 42 -> 7"),
    "unknown key": (("-o", "train.max_step=30"), "train.max_step: unknown key"),
    "bad value": (("-o", "train.max_steps=-3"), "train.max_steps"),
    "impossible": (("-o", "train.per_device_batch_size=3"), "per_device_batch_size"),
    "elastic": (("-o", "resources.nodes={min: 1, max: 2}"), "not yet"),
    "place": (("-o", "checkpoint.uri=ftp://host/x", "-o", "train.max_steps=30"), "ftp://"),
}


@pytest.mark.parametrize(("words", "named"), REFUSED_CHANGES.values(), ids=REFUSED_CHANGES.keys())
def test_refused_change_changes_nothing(
    finished: Finished, words: tuple[str, ...], named: str
) -> None:
    path = finished.path
    words = ("resume", str(path), *words)
    answer, changed = changed_by(finished.vitra, path, *words, code=2)
    assert changed == set()
    assert answer.stdout == ""
    (line,) = answer.stderr.splitlines()
    assert named in line


def test_resume_into_the_place_of_another_run(finished: Finished, tmp_path: Path) -> None:
    (tmp_path / "owner.json").write_text('{"run_id": "another-20260101-000000-abcd"}')
    path = finished.path
    words = ("-o", f"checkpoint.uri={tmp_path}", "-o", "train.max_steps=30")
    answer, changed = changed_by(finished.vitra, path, "resume", str(path), *words, code=6)
    assert changed == set()
    assert "another-20260101-000000-abcd" in answer.stderr


def test_allowed_change_of_what_was_trained(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    words = ("resume", "tiny", "-o", "train.learning_rate=2e-3", "--allow-change")
    assert "already complete" in vitra(*words).stderr
    _lose_checkpoints(path)
    answer = vitra(*words, "-o", "train.max_steps=30", code=6)
    assert "changed: train.learning_rate: 0.001 -> 0.002" in answer.stderr


def _lose_checkpoints(path: Path) -> None:
    for step in (path / "checkpoints").glob("step-*"):
        shutil.rmtree(step)


def _lose_everything(path: Path) -> None:
    shutil.rmtree(path / "checkpoints")


def _break_manifests(path: Path) -> None:
    for manifest in (path / "checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{}")


@pytest.mark.parametrize("damage", [_lose_checkpoints, _lose_everything, _break_manifests])
def test_never_a_silent_fresh_start(
    copied: tuple[Vitra, Path], damage: Callable[[Path], None]
) -> None:
    vitra, path = copied
    damage(path)
    metrics = (path / "metrics.jsonl").read_bytes()
    answer = vitra("resume", "tiny", "-o", "train.max_steps=30", code=6)
    assert "has saved before" in answer.stderr
    assert (path / "metrics.jsonl").read_bytes() == metrics
    assert not (path / "attempts" / "2").exists()
    status = vitra("status", "tiny", "--json").json
    assert (status["state"], status["last_checkpoint_step"]) == ("failed", None)


def _flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_verify_finds_a_flipped_byte(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    shard = path / "checkpoints" / "step-00000015" / "shard-a1-r1.bin"
    _flip_a_byte(shard)
    assert len(vitra("checkpoints", "tiny", "--json").json["complete"]) == 2
    document = vitra("checkpoints", "tiny", "--verify", "--json", code=6).json
    assert [one["step"] for one in document["complete"]] == [20]
    (damaged,) = document["damaged"]
    assert damaged["step"] == 15
    assert shard.name in damaged["reason"]
    assert "DAMAGED" in vitra("checkpoints", "tiny", "--verify", code=6).stdout


def test_missing_file_and_torn_save_are_shown(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    place = path / "checkpoints"
    (place / "step-00000015" / "shard-a1-r0.bin").unlink()
    (place / "step-00000025").mkdir()
    (place / "step-00000025" / "shard-a1-r0.bin").write_bytes(b"half")
    (place / "notes.txt").write_text("mine")
    document = vitra("checkpoints", "tiny", "--json", code=6).json
    assert [one["step"] for one in document["complete"]] == [20]
    assert [one["step"] for one in document["damaged"]] == [15]
    assert [one["step"] for one in document["incomplete"]] == [25]
    assert document["foreign"] == ["notes.txt"]


def test_a_moved_run_takes_its_checkpoints_along(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    shutil.rmtree(path / "checkpoints" / "step-00000020")
    assert vitra("status", "tiny", "--json").json["last_checkpoint_step"] == 15
    document = vitra("checkpoints", "tiny", "--json").json
    assert document["uri"] == str(path / "checkpoints")


def test_a_run_under_supervision_is_left_alone(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    with RunLock(RunDir(path).lock):
        answer, changed = changed_by(vitra, path, "resume", "tiny", code=2)
        assert vitra("status", "tiny", "--json").json["state"] == "completed"
    assert changed == set()
    assert "is being supervised by process" in answer.stderr
    vitra("resume", "tiny")


def test_damaged_plan(copied: tuple[Vitra, Path]) -> None:
    vitra, path = copied
    (path / "plan.json").write_text("{}")
    for words in (("resume", "tiny"), ("checkpoints", "tiny")):
        (line,) = vitra(*words, code=6).stderr.splitlines()
        assert "plan.json" in line
    assert vitra("status", "tiny", "--json").json["total_steps"] is None


def test_place_without_checkpoints(vitra: Vitra) -> None:
    (vitra.directory / "empty").mkdir()
    for place in ("empty", str(vitra.directory / "empty")):
        (line,) = vitra("checkpoints", place, code=4).stderr.splitlines()
        assert "neither a run nor a checkpoint place" in line
