"""What a command loads decides how fast it answers, and where it can run at all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launcher.load import load_spec
from tests.conftest import run_python, tiny_spec, vitra_command

#: The frugal ones first, since one interpreter runs them all: what is not there after a command
#: has been loaded by none of those before it either.
TORCH_FREE = {
    "help": (
        ["--help"],
        {"torch", "pydantic", "submitit", "wandb", "numpy", "fsspec", "yaml", "rich"},
    ),
    "schema": (["schema"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "init": (["init", "--list"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "ps": (["ps"], {"torch", "s3fs", "wandb", "submitit", "numpy", "fsspec", "yaml"}),
    "logs": (["logs", "absent"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "plan": (["plan", "SPEC"], {"torch", "s3fs", "wandb", "submitit", "numpy"}),
    "dry-run": (["submit", "SPEC", "--dry-run"], {"torch", "s3fs", "wandb", "numpy"}),
    "status": (["status", "absent"], {"torch", "s3fs", "wandb", "submitit"}),
    "export": (["export", "absent", "--to", "x"], {"torch", "safetensors", "wandb", "submitit"}),
}
_RUN_EACH = """
import runpy, sys
for words in COMMANDS:
    sys.argv = ["vitra", *words]
    try:
        runpy.run_path(VITRA, run_name="__main__")
    except SystemExit:
        print("\\nLOADED", *sys.modules)
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The packages that there are after each command."""
    spec = tmp_path_factory.mktemp("imports") / "spec.yaml"
    spec.write_text(tiny_spec())
    commands = [
        [str(spec) if word == "SPEC" else word for word in c] for c, _ in TORCH_FREE.values()
    ]
    said = run_python(f"VITRA, COMMANDS = {vitra_command()!r}, {commands!r}\n{_RUN_EACH}")
    lines = [line.split()[1:] for line in said.splitlines() if line.startswith("LOADED ")]
    found = [{name.partition(".")[0] for name in line} for line in lines]
    return dict(zip(TORCH_FREE, found, strict=True))


@pytest.mark.parametrize("command", TORCH_FREE)
def test_command_loads_no_more_than_it_needs(loaded: dict[str, set[str]], command: str) -> None:
    assert "launcher" in loaded[command]
    assert not loaded[command] & TORCH_FREE[command][1]


#: What a plan takes of ours. Another one has to be worth its time.
PLAN_NEEDS = {
    *("launcher", "launcher.cli", "launcher.complete", "launcher.container", "launcher.drafting"),
    *("launcher.equation", "launcher.fixes", "launcher.help", "launcher.load", "launcher.planner"),
    *("launcher.profiles", "launcher.progress", "launcher.registry", "launcher.show"),
    *("launcher.wording", "launcher.yaml_tree", "trainer", "trainer.spec"),
    *("trainer.spec.container", "trainer.spec.errors", "trainer.spec.fields"),
    *("trainer.spec.options", "trainer.spec.plan", "trainer.spec.ranks", "trainer.spec.run"),
    *("trainer.spec.rundir", "trainer.spec.safety", "trainer.spec.times"),
}


@pytest.mark.parametrize("words", [["plan"], ["submit", "--dry-run"]], ids=["plan", "dry-run"])
def test_a_plan_loads_nothing_of_a_run(tmp_path: Path, words: list[str]) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(tiny_spec())
    said = run_python(
        "import sys; before = set(sys.modules)\n"
        f"sys.argv = {['vitra', *words, str(spec)]!r}\n"
        "from launcher.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print('\\nLOADED', *(set(sys.modules) - before))"
    )
    loaded = said.rpartition("LOADED ")[2].split()
    ours = {name for name in loaded if name.partition(".")[0] in {"launcher", "trainer"}}
    more = set() if words == ["plan"] else {"launcher.jobs", "launcher.request"}
    assert "launcher.planner" in ours
    assert ours <= PLAN_NEEDS | more
    heavy = {"torch", "numpy", "fsspec", "submitit", "wandb", "rich", "asyncio", "ssl", "http"}
    assert not heavy & {*loaded}


def test_the_sender_to_a_tracker_loads_no_torch() -> None:
    """A thread of a library's, started before signals are blocked, would let one through."""
    loaded = run_python("import sys, trainer.wandb_sender\nprint(*sys.modules)").split()
    assert "trainer.wandb_sender" in loaded
    assert not {"torch", "numpy"} & {*loaded}


@pytest.mark.slow
def test_the_probe_loads_no_more_of_torch_than_it_needs(tmp_path: Path) -> None:
    """Whoever submits waits for it; sharded tensors and what plans checkpoints take a second."""
    (tmp_path / "spec.yaml").write_text(tiny_spec())
    spec = load_spec(tmp_path / "spec.yaml", [], environ={}).spec.model_dump_json().encode()
    said = run_python(
        "import sys; from trainer.probe import probe\n"
        f"assert probe({spec!r}, sys.stderr) == 0\nprint(*sys.modules)"
    )
    loaded = set(said.split())
    assert "torch" in loaded, said
    assert not loaded & {"sympy", "torch._dynamo", "torch.distributed.tensor"}


def test_the_shared_contract_loads_neither_torch_nor_the_rest() -> None:
    said = run_python(
        "import importlib, pkgutil, sys, trainer.spec\n"
        "for module in pkgutil.iter_modules(trainer.spec.__path__):\n"
        "    importlib.import_module('trainer.spec.' + module.name)\n"
        "print(*sys.modules)"
    )
    loaded = set(said.split())
    assert "trainer.spec.run" in loaded, said
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & {"torch", "numpy", "fsspec", "yaml", "typer", "launcher"}
    ours = {name for name in loaded if name.startswith("trainer.")}
    assert all(name == "trainer.spec" or name.startswith("trainer.spec.") for name in ours)


def test_the_task_process_is_standard_library_only() -> None:
    """One a rank, and started in the same moment: it must cost next to nothing."""
    said = run_python(
        "import sys; before = set(sys.modules)\nimport launcher.task\n"
        "print(*(set(sys.modules) - before))"
    )
    loaded = said.split()
    assert "launcher.task" in loaded, said
    ours = {
        "launcher",
        "launcher.task",
        "launcher.oom",
        "launcher.slurm_env",
        "trainer",
        "trainer.spec",
        "trainer.spec.rundir",
    }
    roots = {name.partition(".")[0] for name in loaded if name not in ours}
    assert roots <= sys.stdlib_module_names
