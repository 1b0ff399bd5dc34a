"""The snapshot of the code: what of real work trees is copied, and what ranks import from then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import launcher
from launcher import selection
from launcher.environment import importing, with_own_code
from launcher.git import WorkTree
from launcher.snapshot import Seen, place_vitra, take_snapshot, user_path
from tests.conftest import tree
from trainer.spec.errors import SnapshotError, UsageError
from trainer.spec.run import RunSpec
from trainer.spec.rundir import RunDir
from trainer.spec.snapshot import Snapshot

CHECKOUT = Path(launcher.__path__[0]).parent
MARK = "marker-of-a-secret"


@pytest.fixture(scope="module")
def imports() -> Iterator[Imports]:
    server = Imports()
    yield server
    server.stop()


class Imports:
    """The process of tests/import_server.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).parents[1] / "import_server.py")],
            env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(
        self,
        modules: Sequence[str],
        environ: Mapping[str, str],
        *,
        site: Path | None = None,
        run_dir: RunDir | None = None,
    ) -> dict[str, Any]:
        assert self._process.stdin
        assert self._process.stdout
        request = {
            "modules": modules,
            "python_path": environ["PYTHONPATH"].split(os.pathsep),
            "site": site and str(site),
            "run_dir": run_dir and str(run_dir.path),
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer
        return answer

    def stop(self) -> None:
        with self._process as process:
            process.kill()


class Project:
    """A user's project, and a run that is submitted from it."""

    def __init__(
        self,
        imports: Imports,
        root: Path,
        files: Mapping[str, str | bytes],
        *,
        git: bool = True,
    ) -> None:
        self._import = imports
        self._site: Path | None = None
        self.top = root / "project"
        self.top.mkdir(parents=True)
        self.run_dir = RunDir(root / "runs" / "a-20260101-000000-abcd")
        self.run_dir.path.mkdir(parents=True, mode=0o750)
        self.said: list[str] = []
        self.write(files)
        if git:
            self.git("init", "-q")
            self.commit()

    def write(self, files: Mapping[str, str | bytes]) -> None:
        for name, content in files.items():
            path = self.top / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.encode() if isinstance(content, str) else content)

    def git(self, *words: str, at: Path | None = None) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        allow = ("-c", "protocol.file.allow=always")
        done = subprocess.run(
            ["git", "-C", str(at or self.top), *author, *allow, *words],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        return done.stdout.strip()

    def commit(self) -> str:
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "work")
        return self.git("rev-parse", "HEAD")

    def submit(
        self,
        *modules: str,
        path: Sequence[Path] = (),
        cwd: Path | None = None,
        site: Path | None = None,
        excluded: Sequence[Path] = (),
        environ: Mapping[str, str] = os.environ,
    ) -> Snapshot:
        """Take the snapshot as submit does; `site` is one more directory of installed packages."""
        self._site = site
        spec = spec_of(*modules)
        searched = user_path(spec, cwd or self.top, os.pathsep.join(map(str, path)))
        vitra = place_vitra(self.run_dir.code, searched)
        paths = searched if vitra is None else [str(vitra), *searched]
        answer = self._import(modules, importing(os.environ, paths), site=site)
        return take_snapshot(
            self.run_dir,
            spec,
            Seen.from_answer(answer),
            path=searched,
            excluded=excluded,
            environ=environ,
            say=self.said.append,
        )

    def imports(self, *names: str, python_path: str = "") -> dict[str, str]:
        """Where a rank gets modules from: paths in code/."""
        snapshot = Snapshot.read(self.run_dir)
        environ = with_own_code({**os.environ, "PYTHONPATH": python_path}, self.run_dir, snapshot)
        found = self._import(names, environ, site=self._site, run_dir=self.run_dir)
        code = self.run_dir.code
        return {name: os.path.relpath(Path(f).resolve(), code) for name, f in found.items()}

    def copied(self, name: str = "project") -> set[str]:
        """Files and links in a tree of code/."""
        top = self.run_dir.code / name
        paths = (path for path in top.rglob("*") if path.is_symlink() or not path.is_dir())
        return {path.relative_to(top).as_posix() for path in paths}


def spec_of(*modules: str) -> RunSpec:
    kinds = [f"{module}:build" for module in modules]
    return RunSpec.model_validate(
        {
            "name": "a",
            "model": {"kind": kinds[0] if kinds else "vla"},
            "data": {"kind": kinds[-1] if kinds else "synthetic"},
            "train": {"global_batch_size": 8, "max_steps": 10},
        }
    )


def secrets_in(directory: Path) -> list[Path]:
    return [p for p, (_, data) in tree(directory).items() if MARK.encode() in data]


def test_tracked_modified_and_untracked_but_never_ignored(imports: Imports, tmp_path: Path) -> None:
    strange = {"täst/a b\n.txt": "1", "-rf": "2", os.fsdecode(b"\xff.bin"): b"\0\1"}
    project = Project(
        imports,
        tmp_path,
        {"comp.py": "", "old.py": "", ".gitignore": "ignored*\n", "run.sh": "true", **strange},
    )
    commit = project.git("rev-parse", "HEAD")
    (project.top / "run.sh").chmod(0o755)
    (project.top / "old.py").unlink()
    project.write({"comp.py": "x = 1\n", "new.py": "", "ignored.bin": "", "ignored/a.py": ""})
    os.mkfifo(project.top / "pipe")
    snapshot = project.submit("comp")
    assert project.copied() == {"comp.py", ".gitignore", "run.sh", "new.py", *strange}
    assert (project.run_dir.code / "project" / "comp.py").read_text() == "x = 1\n"
    assert os.access(project.run_dir.code / "project" / "run.sh", os.X_OK)
    assert (project.run_dir.code / "commit").read_text() == f"{commit}\n"
    (copied,) = snapshot.trees
    assert (copied.source, copied.commit, copied.changed) == (str(project.top), commit, True)
    # The patch leads from the commit to the tree.
    clone = tmp_path / "clone"
    project.git("clone", "-q", str(project.top), str(clone))
    project.git("apply", str(project.run_dir.code / "dirty.patch"), at=clone)
    assert (clone / "comp.py").read_text() == "x = 1\n"
    assert not (clone / "old.py").exists()


def test_what_was_copied_runs_whatever_happens_to_the_tree(
    imports: Imports, tmp_path: Path
) -> None:
    project = Project(
        imports, tmp_path, {"comp.py": "import helper", "helper.py": "", "later.py": ""}
    )
    project.submit("comp")
    project.write({"comp.py": "raise ValueError", "later.py": "raise ValueError"})
    wanted = {name: f"project/{name}.py" for name in ("comp", "helper", "later")}
    assert project.imports(*wanted, python_path=str(project.top)) == wanted
    shutil.rmtree(project.top)
    assert project.imports(*wanted) == wanted


def test_vitra_itself_is_copied_from_a_checkout(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"trainer/__init__.py": "raise ValueError", "comp.py": ""})
    snapshot = project.submit("comp", path=[project.top])
    assert snapshot.path == ("vitra", "project")
    assert "trainer/data/metaworld_mini/meta/info.json" in project.copied("vitra")
    done = subprocess.run(
        [sys.executable, "-P", "-c", "import trainer.spec.plan as p, launcher; print(p.__file__)"],
        env=with_own_code({}, project.run_dir, snapshot),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    copy = project.run_dir.code / "vitra" / "trainer" / "spec" / "plan.py"
    assert done.stdout == f"{copy}\n"


@pytest.mark.slow
def test_installed_vitra_is_left_alone(tmp_path: Path) -> None:
    site = tmp_path / "lib" / "site-packages"
    for name in ("launcher", "trainer"):
        shutil.copytree(CHECKOUT / name, site / name, ignore=shutil.ignore_patterns("*.mp4"))
    own = tmp_path / "own"
    (own / "trainer").mkdir(parents=True)
    place = (
        "import sys; from pathlib import Path; from launcher.snapshot import place_vitra\n"
        "always = sys.argv[2:] == ['always']\n"
        "path = [] if always else sys.argv[2:]\n"
        "print(place_vitra(Path(sys.argv[1]), path, always=always))"
    )

    def placed(*path: Path | str) -> str:
        words = [sys.executable, "-P", "-c", place, tmp_path / "code", *path]
        environ = importing(os.environ, [str(site)])
        return subprocess.run(
            words, env=environ, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.strip()

    assert placed() == "None"
    assert placed(own) == "None", "a directory without code replaces nothing"
    (own / "trainer" / "__init__.py").write_text("")
    assert placed(own) == str(tmp_path / "code" / "vitra")
    copy = tmp_path / "code" / "vitra" / "trainer"
    assert copy.resolve() == site / "trainer"
    shutil.rmtree(tmp_path / "code")
    assert placed("always") == str(tmp_path / "code" / "vitra")
    assert not copy.is_symlink()
    assert (copy / "spec" / "plan.py").is_file()


def test_built_in_components_need_nothing_of_the_user_s(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"numpy.py": "raise ValueError", "a.txt": MARK})
    snapshot = project.submit()
    assert snapshot.path == ("vitra",)
    assert snapshot.trees == snapshot.components == ()
    assert not secrets_in(project.run_dir.path)


def test_secrets_are_skipped_and_named(imports: Imports, tmp_path: Path) -> None:
    names = [
        ".env",
        "conf/.ENV.local",
        "tls/server.pem",
        "tls/Server.KEY",
        "id_rsa",
        ".netrc",
        "aws/credentials",
        ".git-credentials",
        ".env.d/prod",
        "credentials.json",
    ]
    project = Project(imports, tmp_path, {"comp.py": "", **dict.fromkeys(names, MARK)})
    # Changes of a tracked secret, and its removal, would be in the patch.
    project.write({".env": f"{MARK} 2", "conf/.ENV.local": f"{MARK} 2", "untracked.pem": MARK})
    (project.top / ".env.d" / "prod").write_text(f"{MARK} 2")
    (project.top / "id_rsa").unlink()
    (project.top / "innocent").symlink_to(".env")
    (project.top / "keys").symlink_to("tls")
    project.submit("comp")
    assert not secrets_in(project.run_dir.path)
    assert project.copied() == {"comp.py", "innocent", "keys"}
    listed = (project.run_dir.code / "skipped.txt").read_text()
    for name in (*names, "untracked.pem"):
        if name != "id_rsa":
            assert f"project/{name}: a secret's name" in listed
    (said,) = (text for text in project.said if text.startswith("not copied"))
    assert "project/.env," in said


def test_code_with_the_name_of_a_secret_is_refused(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "import id_tools", "id_tools.py": ""})
    with pytest.raises(SnapshotError, match=r"id_tools\.py: module id_tools is imported"):
        project.submit("comp")
    shutil.rmtree(project.run_dir.code)
    shutil.rmtree(project.top / ".git")
    with pytest.raises(SnapshotError, match=r"id_tools\.py: module id_tools is imported"):
        project.submit("comp")


def test_links(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "", "pkg/mod.py": "", "data/x": "1"})
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text(MARK)
    top = project.top
    (top / "relative").symlink_to("data/x")
    (top / "absolute").symlink_to(top / "pkg")
    (top / "up").symlink_to("../outside/file")
    (top / "out").symlink_to(outside)
    (top / "pkg" / "whole").symlink_to("..")
    (top / "dangling").symlink_to("nothing")
    (top / "loop").symlink_to("loop")
    project.commit()
    project.submit("comp")
    copy = project.run_dir.code / "project"
    assert (copy / "relative").resolve() == copy / "data" / "x"
    assert (copy / "absolute").readlink() == Path("pkg")
    assert (copy / "dangling").is_symlink()
    assert not {"up", "out", "pkg/whole"} & project.copied()
    listed = (project.run_dir.code / "skipped.txt").read_text()
    assert f"project/out: a link out of the tree, to {outside}\n" in listed
    assert not secrets_in(project.run_dir.path)


def test_imported_code_behind_links_is_copied(imports: Imports, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    for name in ("one.py", "__init__.py", "later.py", ".env"):
        (shared / name).write_text(MARK if name == ".env" else "")
    files = {"own/__init__.py": "from own import one, inner\nimport pkg", "src/inner.py": ""}
    project = Project(imports, tmp_path, files)
    (project.top / "own" / "one.py").symlink_to(shared / "one.py")
    (project.top / "own" / "inner.py").symlink_to("../src/inner.py")
    (project.top / "pkg").symlink_to(shared)
    project.commit()
    (tmp_path / "way").symlink_to(project.top)
    project.submit("own", cwd=tmp_path / "way")
    shutil.rmtree(shared)
    shutil.rmtree(project.top)
    wanted = {
        "own": "project/own/__init__.py",
        "own.one": "project/own/one.py",
        "own.inner": "project/src/inner.py",
        "pkg.later": "project/pkg/later.py",
    }
    assert project.imports(*wanted) == wanted
    assert not secrets_in(project.run_dir.path)


def test_links_in_packages_outside_a_work_tree(imports: Imports, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "one.py").write_text("")
    project = Project(
        imports, tmp_path, {"real/__init__.py": "from own import one", "real/x": ""}, git=False
    )
    (project.top / "own").symlink_to("real")
    (project.top / "real" / "one.py").symlink_to(shared / "one.py")
    project.submit("own")
    assert project.copied("packages") == {"own/__init__.py", "own/one.py", "own/x"}
    shutil.rmtree(shared)
    assert project.imports("own.one") == {"own.one": "packages/own/one.py"}


def test_size_cap(imports: Imports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "SIZE_CAP_BYTES", 6_000_000)
    project = Project(imports, tmp_path, {"comp.py": "", "small.bin": bytes(1_000_000)})
    project.submit("comp")
    shutil.rmtree(project.run_dir.code)
    project.write({"a/b/big.bin": bytes(2_000_000)})
    project.write({f"images/{i:03}.png": bytes(20_000) for i in range(250)})
    with pytest.raises(SnapshotError) as caught:
        project.submit("comp")
    message = str(caught.value)
    assert "limit is 6.0 MB" in message
    assert "project/images (5.0 MB), project/a/b/big.bin (2.0 MB), project/small.bin" in message
    assert ".gitignore" in message


def test_results_among_the_code_are_not_copied(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": ""})
    results = {
        "runs/a-1/checkpoints/x.bin": MARK,
        "place/step-1/x.bin": MARK,
        "old/b-1/run.json": "{}",
        "old/b-1/plan.json": "{}",
        "old/b-1/code/x.py": MARK,
        "old/place/owner.json": "{}",
        "old/place/step-00000001/x.bin": MARK,
        "env/pyvenv.cfg": "",
        "env/lib/x.py": MARK,
    }
    project.write({**results, "old/notes.txt": ""})
    excluded = [project.top / "runs", project.top / "place"]
    project.submit("comp", excluded=excluded)
    assert project.copied() == {"comp.py", "old/notes.txt"}


def test_run_root_that_is_the_tree_itself(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "", "more.py": ""})
    project.run_dir = RunDir(project.top / "a-20260101-000000-abcd")
    project.run_dir.path.mkdir()
    project.submit("comp", excluded=[project.top])
    assert project.copied() == {"comp.py", "more.py"}


def test_submodules_and_other_repositories(imports: Imports, tmp_path: Path) -> None:
    inner = Project(imports, tmp_path / "inner", {"inner.py": "", ".gitignore": "*.bin\n"})
    project = Project(imports, tmp_path / "outer", {"comp.py": "import inner"})
    project.git("submodule", "--quiet", "add", str(inner.top), "sub")
    project.git("clone", "-q", str(inner.top), "other")
    project.commit()
    project.write({"sub/new.py": "", "sub/x.bin": "", "other/new.py": ""})
    # A submodule that cannot be read must not stop the rest.
    project.git("submodule", "--quiet", "add", str(inner.top), "broken")
    (project.top / "broken" / ".git").write_text("gitdir: /nowhere\n")
    project.submit("comp", path=[project.top / "sub"])
    assert project.copied() >= {"comp.py", "sub/inner.py", "sub/new.py", "other/new.py"}
    assert not {"sub/x.bin", "sub/.git", "other/.git/HEAD"} & project.copied()
    assert "project/broken: a git repo" in (project.run_dir.code / "skipped.txt").read_text()
    assert project.imports("comp", "inner")["inner"] == "project/sub/inner.py"
    assert WorkTree(project.top / "sub", os.environ).top == project.top


EDITABLE = {
    "a directory in a .pth file": {"__editable__.own.pth": "{top}/src\n"},
    "an import hook": {
        "__editable__.own.pth": "import __editable___own_finder as f; f.install()\n",
        "__editable___own_finder.py": """
import sys, importlib.util
MAPPING = {{"own": "{top}/src/own", "later": "{top}/lib/later"}}
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name in MAPPING:
            return importlib.util.spec_from_file_location(name, MAPPING[name] + "/__init__.py")
def install():
    sys.meta_path.append(Finder)
""",
    },
}


@pytest.mark.parametrize("kind", EDITABLE)
def test_editable_installs_are_mapped_to_their_copies(
    imports: Imports, tmp_path: Path, kind: str
) -> None:
    files = {
        "src/own/__init__.py": "",
        "src/own/model.py": "",
        "src/own/later.py": "",
        "lib/later/__init__.py": "",
    }
    project = Project(imports, tmp_path, files)
    site = tmp_path / "site-packages"
    site.mkdir()
    for name, text in EDITABLE[kind].items():
        (site / name).write_text(text.format(top=project.top))
    snapshot = project.submit("own.model", cwd=tmp_path, site=site)
    assert "project/src" in snapshot.path
    wanted = {"own.model": "project/src/own/model.py", "own.later": "project/src/own/later.py"}
    if kind == "an import hook":
        wanted["later"] = "project/lib/later/__init__.py"
    assert project.imports(*wanted) == wanted


def test_a_package_that_is_imported_by_another_name(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"lib/__init__.py": "", "lib/model.py": ""})
    site = tmp_path / "site-packages"
    site.mkdir()
    hook = EDITABLE["an import hook"]["__editable___own_finder.py"].replace("/src/own", "/lib")
    (site / "__editable___own_finder.py").write_text(hook.format(top=project.top))
    (site / "own.pth").write_text("import __editable___own_finder as f; f.install()\n")
    project.submit("own.model", cwd=tmp_path, site=site)
    shutil.move(project.run_dir.path, tmp_path / "moved")
    project.run_dir = RunDir(tmp_path / "moved")
    assert project.imports("own.model") == {"own.model": "project/lib/model.py"}


def test_a_tree_that_is_a_package_itself(imports: Imports, tmp_path: Path) -> None:
    project = Project(
        imports,
        tmp_path,
        {"__init__.py": "", "model.py": "from project import part", "part.py": ""},
    )
    project.submit("project.model", cwd=tmp_path)
    assert project.imports("project.model") == {"project.model": "project/model.py"}


def test_an_editable_install_may_replace_nothing(imports: Imports, tmp_path: Path) -> None:
    """It comes after what is installed, its copy before that."""
    project = Project(imports, tmp_path, {"own.py": "import yaml", "yaml/__init__.py": ""})
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "own.pth").write_text(f"{project.top}\n")
    with pytest.raises(SnapshotError, match="yaml has the name of an installed package"):
        project.submit("own", cwd=tmp_path, site=site)
    # Where the user's comes first in the probe as well, it is what the user asked for.
    shutil.rmtree(project.run_dir.code)
    project.submit("own", site=site)
    assert project.imports("yaml") == {"yaml": "project/yaml/__init__.py"}


def test_what_is_installed_in_the_tree_stays_installed(imports: Imports, tmp_path: Path) -> None:
    project = Project(
        imports, tmp_path, {"comp.py": "import dep, vendored", ".gitignore": "libs\n"}
    )
    site = project.top / "env" / "lib" / "site-packages"
    target = project.top / "libs"
    for directory, name in ((site, "dep"), (target, "vendored")):
        directory.mkdir(parents=True)
        (directory / f"{name}.py").write_text("")
    (target / "vendored-1.dist-info").mkdir()
    (target / "vendored-1.dist-info" / "RECORD").write_text("vendored.py,sha256=x,0\n")
    snapshot = project.submit("comp", path=[target], site=site)
    assert project.copied() >= {"comp.py"}
    assert snapshot.outside == (str(target),)
    assert project.imports("dep", "vendored", "comp") == {
        "comp": "project/comp.py",
        "dep": os.path.relpath(site / "dep.py", project.run_dir.code),
        "vendored": os.path.relpath(target / "vendored.py", project.run_dir.code),
    }


def test_imported_files_are_copied_though_git_ignores_them(
    imports: Imports, tmp_path: Path
) -> None:
    project = Project(
        imports,
        tmp_path,
        {"comp.py": "import _version", "_version.py": "", ".gitignore": "_version.py"},
    )
    project.submit("comp")
    assert project.imports("_version") == {"_version": "project/_version.py"}


def test_outside_a_work_tree_only_packages_are_copied(imports: Imports, tmp_path: Path) -> None:
    files = {
        "own/__init__.py": "",
        "own/model.py": "import helper",
        "own/table.csv": "1",
        "own/.env": MARK,
        "helper.py": "",
        "big.bin": MARK,
    }
    project = Project(imports, tmp_path, files, git=False)
    project.submit("own.model")
    assert project.copied("packages") == {
        "own/__init__.py",
        "own/model.py",
        "own/table.csv",
        "helper.py",
    }
    assert sum("only the package itself is copied" in text for text in project.said) == 1
    assert not secrets_in(project.run_dir.path)
    shutil.rmtree(project.top)
    assert project.imports("own.model", "helper") == {
        "own.model": "packages/own/model.py",
        "helper": "packages/helper.py",
    }


@pytest.mark.parametrize("broken", ["index", "HEAD", "no git"])
def test_without_git_and_with_a_broken_repository(
    imports: Imports, tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = Project(imports, tmp_path, {"own/__init__.py": "", "other.txt": MARK})
    if broken == "no git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        (project.top / ".git" / broken).write_bytes(b"nonsense")
    project.submit("own")
    assert project.copied("packages") == {"own/__init__.py"}
    assert sum("only the package itself is copied" in text for text in project.said) == 1


def test_a_repository_without_a_commit(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": ""}, git=False)
    project.git("init", "-q")
    project.submit("comp")
    assert project.copied() == {"comp.py"}
    assert not (project.run_dir.code / "commit").exists()


def test_another_repository_in_the_environment_changes_nothing(
    imports: Imports, tmp_path: Path
) -> None:
    """As in a git hook, where GIT_DIR names the repository of the hook."""
    other = Project(imports, tmp_path / "other", {"wrong.py": ""})
    project = Project(imports, tmp_path / "own", {"comp.py": ""})
    environ = {**os.environ, "GIT_DIR": str(other.top / ".git"), "GIT_WORK_TREE": str(other.top)}
    project.submit("comp", environ=environ)
    assert project.copied() == {"comp.py"}


def test_nothing_of_the_tree_is_touched(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "", "a.txt": "1"})
    before = tree(project.top)
    project.submit("comp")
    after = {name: at for name, at in tree(project.top).items() if "__pycache__" not in name}
    # git notes there when it looked at a file that was written in the same moment.
    for found in (before, after):
        del found[".git/index"]
    # It comes and goes when the index is written.
    assert {**after, ".git": None} == {**before, ".git": None}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_cannot_be_read(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "", "locked.txt": ""})
    (project.top / "locked.txt").chmod(0)
    with pytest.raises(SnapshotError, match=r"cannot copy .*locked\.txt: Permission denied"):
        project.submit("comp")


def test_directories_that_python_cannot_import_from(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path / "a:b", {"comp.py": ""})
    with pytest.raises(UsageError, match="a:b"):
        project.submit("comp")
    with pytest.raises(UsageError, match="choose another run root"):
        place_vitra(tmp_path / "c:d" / "code", [])


def test_the_run_can_be_removed_and_not_be_edited(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": "", "pkg/a.py": ""})
    project.submit("comp")
    for path in project.run_dir.code.rglob("*"):
        mode = path.lstat().st_mode
        if path.is_file() and path.suffix == ".py":
            assert not mode & 0o222, path
        elif path.is_dir():
            assert mode & 0o700 == 0o700, path
            assert not mode & 0o007, path


def test_what_ranks_import_from(imports: Imports, tmp_path: Path) -> None:
    project = Project(imports, tmp_path, {"comp.py": ""})
    libs = tmp_path / "libs"
    libs.mkdir()
    project.submit("comp", path=[project.top, libs])
    snapshot = Snapshot.read(project.run_dir)
    present = os.pathsep.join(["", ".", str(project.top), "/opt/more", str(libs)])
    environ = with_own_code({"PYTHONPATH": present, "A": "1"}, project.run_dir, snapshot)
    code = project.run_dir.code
    wanted = [str(code / "vitra"), str(code / "project"), str(libs), "/opt/more"]
    assert environ == {"A": "1", "PYTHONPATH": os.pathsep.join(wanted)}


@pytest.mark.slow
def test_a_run_whose_code_is_gone(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match=r"snapshot\.json"):
        Snapshot.read(RunDir(tmp_path))
