"""What a command loads decides how fast it answers, and where it can run at all."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import run_python, tiny_spec, vitra_command

TORCH_FREE = {
    "help": (["--help"], {"torch", "pydantic", "submitit", "wandb", "numpy", "fsspec"}),
    "plan": (["plan", "SPEC"], {"torch", "s3fs", "wandb", "submitit", "numpy"}),
    "dry-run": (["submit", "SPEC", "--dry-run"], {"torch", "s3fs", "wandb", "numpy"}),
    "status": (["status", "absent"], {"torch", "s3fs", "wandb", "submitit"}),
    "ps": (["ps"], {"torch", "s3fs", "wandb", "submitit", "numpy", "fsspec", "yaml"}),
    "logs": (["logs", "absent"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "schema": (["schema"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "init": (["init", "--list"], {"torch", "s3fs", "wandb", "submitit", "numpy", "yaml"}),
    "export": (["export", "absent", "--to", "x"], {"torch", "safetensors", "wandb", "submitit"}),
}


@pytest.mark.parametrize(("words", "unwanted"), TORCH_FREE.values(), ids=TORCH_FREE.keys())
def test_command_loads_no_more_than_it_needs(
    tmp_path_factory: pytest.TempPathFactory, words: list[str], unwanted: set[str]
) -> None:
    spec = tmp_path_factory.mktemp("imports") / "spec.yaml"
    spec.write_text(tiny_spec())
    arguments = [str(spec) if word == "SPEC" else word for word in words]
    said = run_python(
        f"import runpy, sys\nsys.argv = ['vitra', *{arguments!r}]\n"
        f"try: runpy.run_path({vitra_command()!r}, run_name='__main__')\n"
        "finally: print('LOADED', *sys.modules)"
    )
    loaded = {name.partition(".")[0] for name in said.partition("LOADED")[2].split()}
    assert "launcher" in loaded, said
    assert not loaded & unwanted


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
        "launcher.slurm_env",
        "trainer",
        "trainer.spec",
        "trainer.spec.rundir",
    }
    roots = {name.partition(".")[0] for name in loaded if name not in ours}
    assert roots <= sys.stdlib_module_names
