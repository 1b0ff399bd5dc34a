"""Profiles: what a spec leaves out comes from them, and every value and fault knows its place."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from launcher.load import LoadedSpec, Profile, load_spec
from launcher.profiles import find_profiles, keep_profiles, kept_profiles
from launcher.show import profile_lines
from trainer.spec.errors import SpecError, UsageError
from trainer.spec.rundir import RunDir

SPEC = """\
name: a
model: {kind: vla}
data: {kind: synthetic, options: {samples: 64}}
train: {global_batch_size: 8, max_steps: 4}
resources: {nodes: 2, setup: [module load mine], env: {OWN: spec}}
"""
SITE = "resources: {nodes: 1, partition: gpu, qos: low, setup: [module load site], env: {A: 1}}\n"
USER = "resources:\n  qos: high\n  env: {OWN: user, B: 2}\ntracking: {log_interval: 5}\n"


class Files:
    """The directories of a site and a user, and a spec."""

    def __init__(self, root: Path) -> None:
        self.site, self.user = root / "site", root / "config" / "vitra" / "profiles"
        for directory in (self.site, self.user):
            directory.mkdir(parents=True)
        self.spec = root / "spec.yaml"
        self.spec.write_text(SPEC)
        self.environ: Mapping[str, str] = {
            "VITRA_SITE_PROFILES": str(self.site),
            "XDG_CONFIG_HOME": str(root / "config"),
        }

    def load(self, name: str = "big", *overrides: str) -> LoadedSpec:
        profiles = find_profiles(name, self.environ)
        return load_spec(self.spec, overrides, environ={}, profiles=profiles)

    def faults(self, *overrides: str) -> list[str]:
        with pytest.raises(SpecError) as caught:
            self.load("big", *overrides)
        return str(caught.value).splitlines()


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_a_spec_says_more_than_the_user_and_the_user_more_than_the_site(files: Files) -> None:
    (files.site / "big.yaml").write_text(SITE)
    (files.user / "big.yaml").write_text(USER)
    loaded = files.load("big", "resources.qos=urgent")
    resources = loaded.spec.resources
    assert (resources.nodes, resources.partition, resources.qos) == (2, "gpu", "urgent")
    # Mappings are filled in key by key; a list is one value.
    assert resources.setup == ("module load mine",)
    assert resources.env == {"A": "1", "OWN": "spec", "B": "2"}
    assert loaded.spec.tracking.log_interval == 5
    assert loaded.text.decode() == SPEC
    site, user = files.site / "big.yaml", files.user / "big.yaml"
    assert loaded.origins["resources.nodes"] == f"{files.spec}:5:20"
    assert loaded.origins["resources.partition"] == f"{site}:1:34"
    assert loaded.origins["resources.env.B"] == f"{user}:3:23"
    assert loaded.origins["resources.qos"] == "-o resources.qos"
    assert profile_lines(loaded) == [
        f"profile       {site}: resources.partition, resources.env.A",
        f"profile       {user}: resources.env.B, tracking.log_interval",
    ]


@pytest.mark.parametrize("where", ["site", "user"])
def test_either_is_enough(files: Files, where: str) -> None:
    (getattr(files, where) / "big.yaml").write_text(SITE)
    assert files.load().spec.resources.partition == "gpu"


def test_faults_name_the_file_that_they_are_in(files: Files) -> None:
    (files.site / "big.yaml").write_text("resources:\n  partitoin: gpu\n  mem_gb: -1\n")
    (files.user / "big.yaml").write_text("name: b\ntrain:\n  learning_rate: fast\n")
    found = files.faults("train.weight_decay=-3")
    site, user = files.site / "big.yaml", files.user / "big.yaml"
    assert len(found) == 5
    assert found[0].startswith(f"{site}:2:3: resources.partitoin: unknown key; did you mean")
    assert found[1].startswith(f"{site}:3:11: resources.mem_gb: ")
    assert found[2].startswith(f"{user}:1:1: name: a profile is for many runs")
    assert found[3].startswith(f"{user}:3:18: train.learning_rate: ")
    assert found[4].startswith("-o train.weight_decay: ")


@pytest.mark.parametrize("text", ["", "- a\n", "a: [\n", "a: 1\na: 2\n", "just words\n"])
def test_a_file_that_is_no_profile(files: Files, text: str) -> None:
    (files.user / "big.yaml").write_text(text)
    assert all(line.startswith(f"{files.user / 'big.yaml'}:") for line in files.faults())


def test_a_profile_that_there_is_not(files: Files) -> None:
    (files.site / "small.yaml").write_text(SITE)
    with pytest.raises(UsageError, match=r"--profile big: there is none in .*known: small"):
        find_profiles("big", files.environ)
    for name in ("../big", "", "a/b", ".hidden", "a" * 65):
        with pytest.raises(UsageError, match="is no name"):
            find_profiles(name, files.environ)


def test_a_run_keeps_its_profiles(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    assert kept_profiles(run_dir) == []
    keep_profiles(run_dir, [])
    assert list(tmp_path.iterdir()) == []
    profiles = [Profile(f"seed: {n}\n".encode(), f"/{n}.yaml") for n in range(12)]
    keep_profiles(run_dir, profiles)
    assert [profile.text for profile in kept_profiles(run_dir)] == [p.text for p in profiles]


@pytest.mark.slow
def test_a_run_goes_on_with_the_profile_that_it_was_submitted_with(
    files: Files, vitra: SimpleNamespace
) -> None:
    """Whatever has become of the file since."""
    vitra.environ = dict(files.environ)
    (files.user / "big.yaml").write_text("tracking: {log_interval: 2}\n")
    spec = vitra.spec(train__max_steps=4, resources__tasks_per_node=1)
    plan = vitra("plan", spec, "--profile", "big", "--json").json
    assert plan["origins"]["tracking.log_interval"] == f"{files.user / 'big.yaml'}:1:26"
    run = vitra("submit", spec, "--local", "--profile", "big", "--json").json["run_id"]
    (files.user / "big.yaml").unlink()
    vitra("resume", run, "-o", "train.max_steps=8")
    metrics = (vitra.directory / "runs" / run / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 4
    assert "there is none in" in vitra("plan", spec, "--profile", "big", code=2).stderr
