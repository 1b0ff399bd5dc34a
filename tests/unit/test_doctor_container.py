"""What `vitra doctor` finds of a container: each thing broken, found, and told with what helps.

Charliecloud is the real one, on an image whose programs are this machine's. Of Apptainer and of a
srun with pyxis there is a small program of the test's, which answers as the real one does, and runs
the task outside of any image.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from launcher import doctor, doctor_container
from launcher.container_look import Request, look
from launcher.drafting import Draft, draft
from launcher.findings import Finding, Level
from launcher.places import Here, Node, Place
from tests.conftest import tiny_spec
from tests.unit.fake_slurm import FakeSlurm
from tests.unit.findings import only
from trainer.spec.container import ContainerSpec, Mount

needs_charliecloud = pytest.mark.skipif(
    shutil.which("ch-run") is None or not Path("/usr/bin/python3").exists(),
    reason="needs Charliecloud, and a Python in /usr",
)
NO_NODE = "Unable to allocate resources: Requested nodes are busy"
STARTS = "sbatch: Job 8 to start at 2026-12-02T04:51:37 using 4 processors on nodes node1\n"
PARTITION = (
    "PartitionName=low Default=YES GraceTime=20 MaxNodes=UNLIMITED MaxTime=UNLIMITED "
    "PreemptMode=REQUEUE State=UP TotalCPUs=256 TotalNodes=4\n"
)
PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "xxhash")
ALL_WELL = [Level.OK] * 4

# srun, on a node that is this machine: it runs what it is told to.
SRUN = """\
#!/bin/sh
[ "$1" != --help ] || { echo "srun OPTIONS"; echo "%s"; exit; }
while case "$1" in --container*) %s ;; --*) ;; *) false ;; esac; do shift; done
exec "$@"
"""
#: Not a trace of pyxis, and how srun ends where it is asked for it.
PLAIN = ("", "echo \"srun: unrecognized option '$1'\" >&2; exit 1")
PYXIS = ("      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH", ":")

APPTAINER = """\
#!/bin/sh
[ "$1" != --version ] || { echo "apptainer version 1.3.4"; exit; }
while [ "$1" != "$IMAGE" ]; do shift; done
shift
%s
exec "$@"
"""


class Quick(Node):
    """A node that is this very process, for what it has; and srun's, for what is in an image."""

    def run(self, argv: Sequence[str], **more: Any) -> str:
        if "launcher.container_look" in argv:
            return look(Request.model_validate_json(argv[-1])).model_dump_json()
        return super().run(argv, **more)


class Site:
    """A cluster with one node, this machine, and its commands in a directory of the test's."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.image = directory / "image"
        self.packages = directory / "packages"
        self.work = directory / "work"
        for made in (self.packages, self.work, directory / "bin", directory / "runs"):
            made.mkdir()
        self.fake = FakeSlurm(directory / "bin")
        self.srun(PLAIN)
        # What an image has: this Python and these packages, which load in no time.
        self.command("python3", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        for name in PACKAGES:
            self.package(name, importlib.metadata.version(name))

    def command(self, name: str, text: str) -> None:
        (self.fake.directory / name).write_text(text)
        (self.fake.directory / name).chmod(0o755)

    def srun(self, kind: tuple[str, str]) -> None:
        self.command("srun", SRUN % kind)

    def apptainer(self, first: str = "") -> None:
        """Have an Apptainer, and its image; `first` is what it does before the task's words."""
        self.command("apptainer", APPTAINER.replace("$IMAGE", str(self.image)) % first)
        self.image.touch()

    def package(self, name: str, version: str, text: str = "class version: cuda = None\n") -> None:
        (self.packages / f"{name}.py").write_text(text)
        for old in self.packages.glob(f"{name}-*"):
            shutil.rmtree(old)
        about = self.packages / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")

    def draft(self, runtime: str, **changes: Any) -> Draft:
        container = {"runtime": runtime, "image": str(self.image), "mounts": []}
        container |= changes.pop("container", {})
        path = self.directory / "spec.yaml"
        path.write_text(tiny_spec(resources__container=container, **changes))
        runs = str(self.directory / "runs")
        return draft(path, [], run_root=runs, environ=os.environ)

    def findings(
        self, runtime: str, *, place: Place | None = None, **changes: Any
    ) -> list[Finding]:
        # Loaded from there in the image; what looks outside of it has all the real ones.
        slurm = self.fake.slurm()
        inside = {**slurm.job_environ, "PYTHONPATH": str(self.packages)}
        plan = self.draft(runtime, **changes).plan
        where = place or Quick(slurm, plan.spec.resources)
        return list(doctor_container.container_findings(plan, where, inside, self.work))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_without_a_container_nothing_is_said(site: Site) -> None:
    assert site.findings("none") == []


def test_apptainer_where_all_is_well(site: Site) -> None:
    site.apptainer()
    findings = site.findings("apptainer", place=Node(site.fake.slurm()))
    assert [f.level for f in findings] == ALL_WELL, findings
    assert [f.check for f in findings] == ["container", "image", "mounts", "in the image"]
    assert "version 1.3.4" in findings[0].text
    assert f"torch {importlib.metadata.version('torch')}" in findings[3].text


def test_a_runtime_that_nodes_do_not_have(site: Site) -> None:
    if shutil.which("apptainer"):
        pytest.skip("there is an Apptainer")
    site.image.touch()
    found = only(site.findings("apptainer"), Level.FAULT)
    assert "apptainer is not in PATH on" in found.text
    assert (found.check, found.exit_code) == ("container", 3)
    # It may come with a module that the batch script loads, and doctor does not.
    brought = site.findings("apptainer", resources__setup=["module load apptainer"])
    assert [f.level for f in brought if f.level is not Level.OK] == [Level.WARNING] * 2
    assert "resources.setup" in brought[0].text


def test_an_apptainer_image_that_is_not_there(site: Site) -> None:
    site.apptainer()
    site.image.unlink()
    found = only(site.findings("apptainer"), Level.FAULT)
    assert f"{site.image}, as {os.uname().nodename} sees it, is not there" in found.text
    assert (found.check, found.exit_code) == ("image", 2)
    assert str(site.image) in str(found.fix)


def test_an_image_that_each_start_would_fetch(site: Site) -> None:
    site.apptainer("exit 70")
    found = only(
        site.findings("apptainer", container={"image": "docker://team/vitra:1"}), Level.WARNING
    )
    assert "apptainer pull FILE.sif docker://team/vitra:1" in str(found.fix)
    site.srun(PYXIS)
    found = only(
        site.findings("pyxis", container={"image": "site.org#team/vitra:1"}), Level.WARNING
    )
    assert "docker://site.org/team/vitra:1" in str(found.fix)


def test_a_srun_without_pyxis(site: Site) -> None:
    site.image.touch()
    found = only(site.findings("pyxis"), Level.FAULT)
    assert "has no --container-image" in found.text
    assert (found.check, found.exit_code) == ("container", 3)


def test_pyxis(site: Site) -> None:
    site.srun(PYXIS)
    found = only(site.findings("pyxis"), Level.FAULT)
    assert (found.check, found.exit_code) == ("image", 2)
    site.image.touch()
    findings = site.findings("pyxis")
    assert [f.level for f in findings] == ALL_WELL, findings
    # Nodes have it, and the host that asks has not.
    site.srun((PYXIS[0], PLAIN[1]))
    found = only(site.findings("pyxis"), Level.WARNING)
    assert "unrecognized option" in found.text


@pytest.mark.parametrize(
    ("first", "words"),
    [
        ("echo 'FATAL: could not open image' >&2; exit 255", "FATAL: could not open image"),
        ("echo 'Unknown option: -P' >&2; exit 2", "Unknown option: -P"),
        ("exit 0", "gave no answer"),
        ("echo '{}'; exit 0", "gave no answer"),
    ],
)
def test_an_image_in_which_python_does_not_start(first: str, words: str, site: Site) -> None:
    site.apptainer(first)
    found = only(site.findings("apptainer"), Level.FAULT)
    assert words in found.text
    assert (found.check, found.exit_code) == ("in the image", 2)


def test_an_image_that_does_not_answer_in_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.apptainer("exec sleep 600")
    monkeypatch.setattr(doctor_container, "INSIDE_WITHIN_S", 0.2)

    class Node(Here):
        is_node = True

    place = Node(site.fake.slurm().job_environ)
    found = only(site.findings("apptainer", place=place), Level.WARNING)
    assert "gave no answer within 0.2 s" in found.text


def test_places_that_do_not_get_into_the_image(site: Site) -> None:
    runs = site.directory / "runs"
    site.apptainer(f"rmdir {site.work} {runs}")
    findings = site.findings("apptainer")
    wrong = [f.text for f in findings if f.level is Level.FAULT]
    assert len(wrong) == 3, findings
    assert sum(f"{site.work} cannot be read in the image" in text for text in wrong) == 1
    assert f"{runs} cannot be written to in the image" in wrong[2]
    assert doctor.first_exit_code(findings) == 2


def test_packages_that_an_image_has_not(site: Site) -> None:
    site.apptainer()
    site.package("torch", "1.0", "raise ImportError('libcudart.so.12: cannot open')")
    found = only(site.findings("apptainer"), Level.FAULT)
    assert "has no torch that a rank could import: ImportError: libcudart" in found.text
    assert found.exit_code == 2


def test_packages_of_other_versions(site: Site) -> None:
    site.apptainer()
    ours = importlib.metadata.version("torch").partition("+")[0]
    site.package("torch", f"{ours}+cu999")
    assert [f.level for f in site.findings("apptainer")] == ALL_WELL
    site.package("torch", "2.0.1")
    found = only(site.findings("apptainer"), Level.WARNING)
    assert "torch 2.0.1 there" in found.text


def test_gpus_that_the_image_s_torch_cannot_use(site: Site) -> None:
    site.apptainer()
    found = only(site.findings("apptainer", resources__gpus_per_node=2), Level.FAULT)
    assert "is built for CPUs" in found.text
    site.package("torch", importlib.metadata.version("torch"), "class version: cuda = '12.8'\n")
    findings = site.findings("apptainer", resources__gpus_per_node=2)
    assert [f.level for f in findings] == ALL_WELL


def test_a_mount_of_nothing(site: Site) -> None:
    site.apptainer()
    gone = site.directory / "gone"
    found = only(
        site.findings("apptainer", container={"mounts": [f"{gone}:/data:ro"]}), Level.FAULT
    )
    assert f"resources.container.mounts: {gone}, as " in found.text
    assert (found.check, found.exit_code) == ("mounts", 2)


def test_places_that_a_rank_needs(site: Site) -> None:
    site.apptainer()
    # What the run makes need not be there; the rest does.
    shutil.rmtree(site.directory / "runs")
    findings = site.findings("apptainer", checkpoint__uri=str(site.directory / "new" / "place"))
    assert findings[2].level is Level.OK, findings
    weights = site.directory / "gone" / "base.safetensors"
    found = only(site.findings("apptainer", checkpoint__init_from=str(weights)), Level.FAULT)
    assert f"checkpoint.init_from: {weights.parent}, as " in found.text
    site.work.rmdir()
    found = only(site.findings("apptainer"), Level.WARNING)
    assert "ranks start in the run directory" in found.text


def test_this_host_where_no_node_is_free(site: Site) -> None:
    """What this host lacks a node may have: warnings, and said."""
    if shutil.which("apptainer"):
        pytest.skip("there is an Apptainer")
    up = {"out": "Slurmctld(primary) at head is UP\n"}
    site.fake.play("scontrol", {"out": "slurm-wlm 22.05.8\n"}, up, {"out": PARTITION})
    site.fake.play("sinfo", {"out": "4|64|512000|(null)\n"})
    site.fake.play("sbatch", {"err": STARTS})
    site.command("srun", f"#!/bin/sh\necho 'srun: error: {NO_NODE}' >&2\nexit 1\n")
    findings = list(
        doctor.slurm_findings(site.draft("apptainer"), site.directory, site.fake.slurm())
    )
    wrong = [f for f in findings if f.level is not Level.OK]
    assert [f.check for f in wrong] == ["node", "container", "container", "image"]
    assert {f.level for f in wrong} == {Level.WARNING}
    assert "no compute node could be asked" in wrong[1].text
    assert "apptainer is not in PATH" in wrong[2].text
    assert doctor.first_exit_code(findings) == 0


def test_a_node_that_is_free_no_longer(site: Site) -> None:
    site.command("srun", f"#!/bin/sh\necho 'srun: error: {NO_NODE}' >&2\nexit 1\n")
    place = Node(site.fake.slurm())
    found = only(site.findings("apptainer", place=place), Level.WARNING)
    assert (found.check, "Requested nodes are busy" in found.text) == ("container", True)


@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("echo 'No module named launcher.container_look' >&2; exit 1", "No module named launcher"),
        ("echo 'Welcome to this node'", "Invalid JSON"),
        (":", "Invalid JSON"),
    ],
)
def test_a_node_that_cannot_look(does: str, words: str, site: Site) -> None:
    site.command("srun", f"#!/bin/sh\n{does}\n")
    found = only(site.findings("apptainer", place=Node(site.fake.slurm())), Level.FAULT)
    assert words in found.text
    assert (found.check, found.exit_code) == ("container", 3)


def test_a_container_without_slurm(site: Site) -> None:
    slurm = doctor.Slurm({"PATH": str(site.packages)})
    findings = list(doctor.slurm_findings(site.draft("apptainer"), site.directory, slurm))
    assert [f.level for f in findings] == [Level.WARNING, Level.FAULT]
    assert "--local starts no containers" in findings[1].text
    assert findings[1].exit_code == 2


def seen_of(image: Path, *mounts: Mount) -> Any:
    container = ContainerSpec(runtime="charliecloud", image=str(image))
    return look(Request(container=container, mounts=mounts, paths=(), search=""))


def test_directories_that_are_no_image(tmp_path: Path) -> None:
    image = tmp_path / "image"
    assert seen_of(image).problem == "is not there"
    image.touch()
    assert seen_of(image).problem == "is no directory"
    image.unlink()
    image.mkdir()
    assert "neither bin nor usr" in str(seen_of(image).problem)
    (image / "usr").mkdir()
    assert "no ch/environment" in str(seen_of(image).problem)
    (image / "ch").mkdir()
    (image / "ch" / "environment").touch()
    assert seen_of(image).problem is None
    image.chmod(0)
    if not os.access(image, os.R_OK):
        assert "Permission denied" in str(seen_of(image).problem)
    image.chmod(0o755)


def test_looking_for_mount_points_makes_none(tmp_path: Path) -> None:
    image = tmp_path / "image"
    (image / "there").mkdir(parents=True)
    (image / "link").symlink_to(tmp_path)
    mounts = [Mount("/a", target) for target in ("/there", "/link/x", "/new/x")]
    seen = seen_of(image, *mounts)
    assert (seen.unmade, seen.cannot_make) == (("/new/x",), None)
    assert sorted(path.name for path in image.iterdir()) == ["link", "there"]
    (image / "new").touch()
    seen = seen_of(image, *mounts)
    assert "has no /new/x to mount /a at, and it cannot be made: File exists" in seen.cannot_make[0]


@pytest.fixture
def charliecloud(site: Site) -> Site:
    """An image with no files of its own to speak of: it has this machine's programs mounted."""
    for name in ("dev", "proc", "sys", "etc", "tmp", "home", "host", "ch"):
        (site.image / name).mkdir(parents=True)
    for name in ("passwd", "group", "hosts", "resolv.conf"):
        (site.image / "etc" / name).touch()
    (site.image / "usr").symlink_to("host")
    for name in ("bin", "lib", "lib64"):
        (site.image / name).symlink_to(f"host/{name}")
    (site.image / "ch" / "environment").write_text("PATH=/bin\n")
    return site


HOST = {"mounts": ["/usr:/host"]}


@needs_charliecloud
def test_charliecloud_where_all_is_well(charliecloud: Site) -> None:
    # The host's /tmp is there unasked; pytest's directories may lie elsewhere.
    mounts = [*HOST["mounts"], f"{charliecloud.packages}:{charliecloud.packages}"]
    (charliecloud.image / str(charliecloud.packages)[1:]).mkdir(parents=True)
    findings = charliecloud.findings("charliecloud", container={"mounts": mounts})
    assert [f.level for f in findings] == ALL_WELL, findings
    assert "ch-run on" in findings[0].text
    # Nothing was made in the image.
    assert not (charliecloud.image / str(charliecloud.work)[1:]).exists()


@needs_charliecloud
def test_charliecloud_images_that_lack_something(charliecloud: Site) -> None:
    shutil.rmtree(charliecloud.packages)
    charliecloud.packages.mkdir()
    found = only(charliecloud.findings("charliecloud", container=HOST), Level.FAULT)
    assert f"has no {', '.join(PACKAGES)} that a rank could import" in found.text
    # What it lacks cannot be told before all that is mounted has its place.
    more = {"mounts": [*HOST["mounts"], "/usr:/not/made"]}
    found = only(charliecloud.findings("charliecloud", container=more), Level.WARNING)
    assert "/not/made has no place in it yet" in found.text
    (charliecloud.image / "not").touch()
    found = only(charliecloud.findings("charliecloud", container=more), Level.FAULT)
    assert "cannot be made: " in found.text
