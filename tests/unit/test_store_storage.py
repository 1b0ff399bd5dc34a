"""Files on disk: whole or not there, durable in the right order, errors that say the way out."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from store_helpers import before_each_change

from trainer.spec.errors import StorageError, UsageError
from trainer.store.storage import LocalStorage, local_path_of, open_storage


def needs_mount(path: Path, options: str) -> None:
    """Mount a small tmpfs at `path`, or skip the test."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no mount command")
    if done.returncode:
        pytest.skip(f"may not mount a tmpfs here: {done.stderr.strip()}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "small"
    needs_mount(path, "size=256k")
    yield path
    subprocess.run(["umount", str(path)], check=True)


@pytest.fixture
def read_only_disk(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "read-only"
    needs_mount(path, "ro,size=256k")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def everything_in(path: Path) -> list[str]:
    return sorted(str(one.relative_to(path)) for one in path.rglob("*"))


def test_a_created_file_holds_the_chunks_in_order(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "deep" / "place")
    square = memoryview(bytes(range(24))).cast("B", (4, 6))
    empty = memoryview(bytearray()).cast("B")
    storage.create("step-00000001/shard-a1-r0.bin", [b"ab", bytearray(b"cd"), empty, square])
    name = "step-00000001/shard-a1-r0.bin"
    assert storage.read(name) == b"abcd" + bytes(range(24))
    assert storage.size(name) == 28
    assert storage.read_range(name, 2, 4) == b"cd\x00\x01"
    assert storage.read_range(name, 26, 100) == b"\x16\x17"
    assert storage.read_range(name, 100, 1) == b""
    assert storage.names() == ["step-00000001/"]
    assert storage.names("step-00000001") == ["shard-a1-r0.bin"]


def test_modes_keep_other_users_out(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        LocalStorage(tmp_path / "place").create("step-00000001/shard-a1-r0.bin", [b"x"])
        LocalStorage(tmp_path / "place").claim("owner.json", b"{}")
    finally:
        os.umask(before)
    modes = {one.name: one.stat().st_mode & 0o777 for one in (tmp_path / "place").rglob("*")}
    assert (tmp_path / "place").stat().st_mode & 0o777 == 0o750
    assert modes == {"step-00000001": 0o750, "shard-a1-r0.bin": 0o640, "owner.json": 0o640}


def test_what_is_not_there_is_an_answer(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "nowhere")
    assert storage.names() == []
    assert storage.names("step-00000001") == []
    assert storage.size("owner.json") is None
    assert storage.remove("owner.json") is False
    assert storage.remove_empty_dir("step-00000001") is True
    assert storage.discard_leftovers() == 0
    with pytest.raises(FileNotFoundError):
        storage.read("owner.json")
    with pytest.raises(FileNotFoundError):
        storage.read_range("owner.json", 0, 1)
    assert not (tmp_path / "nowhere").exists()


def test_names_shows_at_once_what_others_write(tmp_path: Path) -> None:
    mine, other = LocalStorage(tmp_path), LocalStorage(tmp_path)
    assert mine.names() == []
    other.create("step-00000001/a.bin", [b"x"])
    other.claim("attempt-1.json", b"{}")
    assert mine.names() == ["attempt-1.json", "step-00000001/"]


def test_create_never_replaces_and_takes_no_chunk_if_the_name_is_taken(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("a.bin", [b"first"])
    taken: list[int] = []

    def chunks() -> Iterator[bytes]:
        taken.append(1)
        yield b"second"

    with pytest.raises(FileExistsError):
        storage.create("a.bin", chunks())
    assert taken == []
    assert storage.read("a.bin") == b"first"


def test_a_create_that_fails_leaves_nothing(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)

    def chunks() -> Iterator[bytes]:
        yield b"half"
        assert (tmp_path / "a.bin").read_bytes() == b"half"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.create("a.bin", chunks())
    assert everything_in(tmp_path) == []


def test_a_claim_is_exclusive_and_whole(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "place")
    assert storage.claim("attempt-1.json", b"one") is True
    assert storage.claim("attempt-1.json", b"two") is False
    assert storage.read("attempt-1.json") == b"one"
    assert everything_in(tmp_path) == ["place", "place/attempt-1.json"]


def test_a_claim_that_succeeded_before_its_answer_was_lost_is_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_twice(*args: Any, **kwargs: Any) -> None:
        link(*args, **kwargs)
        link(*args, **kwargs)  # what a network file system does after a lost answer: EEXIST

    monkeypatch.setattr(os, "link", link_twice)
    assert LocalStorage(tmp_path).claim("attempt-1.json", b"one") is True
    assert everything_in(tmp_path) == ["attempt-1.json"]


def test_a_file_system_without_hard_links_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StorageError, match=r"does not allow hard links.*set checkpoint\.uri"):
        LocalStorage(tmp_path).probe()
    assert everything_in(tmp_path) == []


def test_replace_compares_first(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    assert storage.replace("m.json", b"new", expected=b"old") is False
    storage.claim("m.json", b"old")
    assert storage.replace("m.json", b"new", expected=b"other") is False
    assert storage.read("m.json") == b"old"
    assert storage.replace("m.json", b"new", expected=b"old") is True
    assert storage.read("m.json") == b"new"
    assert everything_in(tmp_path) == ["m.json"]


def test_writes_survive_a_sweep_of_their_temporary_files_and_directories(tmp_path: Path) -> None:
    """Another process sweeps before many a single call; only what is finished stays."""
    storage, sweeper = LocalStorage(tmp_path / "place"), LocalStorage(tmp_path / "place")
    swept: list[int] = []

    def sweep(n: int, _call: str, _args: tuple[Any, ...]) -> None:
        if sum(swept) < 5:
            swept.append(sweeper.discard_leftovers("step-00000001"))
        if n < 20:
            sweeper.remove_empty_dir("step-00000001")
            sweeper.remove_empty_dir("step-00000002")

    with before_each_change(sweep):
        assert storage.claim("step-00000001/manifest.json", b"old")
    assert sum(swept) == 5
    swept.clear()
    with before_each_change(sweep):
        assert storage.replace("step-00000001/manifest.json", b"new", expected=b"old")
    assert sum(swept) == 5
    assert storage.read("step-00000001/manifest.json") == b"new"
    assert everything_in(tmp_path / "place") == ["step-00000001", "step-00000001/manifest.json"]
    swept.clear()
    with before_each_change(sweep):
        storage.create("step-00000002/a.bin", [b"x"])
    assert storage.read("step-00000002/a.bin") == b"x"


def test_leftovers_are_hidden_and_swept_and_foreign_dot_files_are_not(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / ".tmp-123-0123456789abcdef").write_bytes(b"half")
    (tmp_path / ".tmp-mine").write_bytes(b"foreign")
    assert storage.names() == [".tmp-mine"]
    assert storage.discard_leftovers() == 1
    assert everything_in(tmp_path) == [".tmp-mine"]


def test_remove_empty_dir_leaves_a_directory_that_is_not_empty(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.create("step-00000001/a.bin", [b"x"])
    assert storage.remove_empty_dir("step-00000001") is False
    assert storage.remove("step-00000001/a.bin") is True
    assert storage.remove_empty_dir("step-00000001") is True
    assert everything_in(tmp_path) == []


def test_everything_is_synced_before_it_can_be_seen(tmp_path: Path) -> None:
    """The order that a power cut needs: content, then name, then the directories of the name."""
    storage = LocalStorage(tmp_path / "place")
    trace: list[tuple[str, str]] = []

    def note(_n: int, call: str, args: tuple[Any, ...]) -> None:
        if call in ("write", "fsync"):
            path = Path(f"/proc/self/fd/{args[0]}").readlink()
        else:
            path = Path(args[-1] if call == "link" else args[0])
        name = "temp" if path.name.startswith(".tmp-") else path.name
        trace.append((call, name))

    with before_each_change(note):
        storage.create("step-00000001/a.bin", [b"x"])
        storage.claim("step-00000001/m.json", b"old")
        storage.replace("step-00000001/m.json", b"new", expected=b"old")
    made = [("mkdir", "place"), ("fsync", tmp_path.name)]
    made += [("mkdir", "step-00000001"), ("fsync", "place")]
    written = [("open", "temp"), ("write", "temp"), ("fsync", "temp")]
    synced = [("fsync", "step-00000001"), ("fsync", "place")]
    create = [("open", "a.bin"), *made, ("open", "a.bin"), ("write", "a.bin"), ("fsync", "a.bin")]
    claim = [*written, ("link", "m.json"), ("unlink", "temp"), *synced]
    replace = [*written, ("replace", "temp"), ("unlink", "temp"), *synced]
    assert trace == [*create, ("fsync", "step-00000001"), *claim, *replace]


def test_a_full_disk_is_said_and_leaves_nothing_half_written(small_disk: Path) -> None:
    storage = LocalStorage(small_disk)
    storage.create("step-00000001/a.bin", [bytes(100_000)])
    with pytest.raises(StorageError, match="No space left on device; free space there") as caught:
        storage.create("step-00000002/b.bin", [bytes(4096)] * 100)
    assert str(small_disk / "step-00000002" / "b.bin") in str(caught.value)
    assert storage.names("step-00000002") == []
    storage.create("filler.bin", [bytes(4096)] * int(os.statvfs(small_disk).f_bavail))
    with pytest.raises(StorageError, match="No space left"):
        storage.claim("attempt-1.json", bytes(4096))
    with pytest.raises(StorageError, match="No space left"):
        storage.replace("filler.bin", bytes(4096), expected=b"")
    with pytest.raises(StorageError, match="No space left"):
        storage.probe()
    assert storage.remove("filler.bin")
    assert everything_in(small_disk) == ["step-00000001", "step-00000001/a.bin", "step-00000002"]
    storage.create("step-00000002/b.bin", [bytes(100_000)])


def test_a_file_size_limit_is_said_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(StorageError, match=r"a\.bin: File too large; raise the file size"):
            storage.create("a.bin", [bytes(6000), bytes(6000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert everything_in(tmp_path) == []


def test_a_read_only_place_is_refused_by_the_probe(read_only_disk: Path) -> None:
    for place in (read_only_disk, read_only_disk / "deeper" / "place"):
        with pytest.raises(
            StorageError, match="Read-only file system; mounted read-only"
        ) as caught:
            LocalStorage(place).probe()
        assert str(place) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_place_without_permission_is_refused_by_the_probe(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="Permission denied; give this user access"):
        LocalStorage(tmp_path / "place").probe()
    tmp_path.chmod(0o700)


@pytest.mark.parametrize("below", ["", "place", "deeper/place"])
def test_a_file_where_a_directory_should_be_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    storage = LocalStorage(tmp_path / "file" / below)
    for act in (
        storage.probe,
        storage.names,
        lambda: storage.claim("owner.json", b"{}"),
        lambda: storage.create("a.bin", [b"x"]),
        lambda: storage.create("step-00000001/a.bin", [b"x"]),
    ):
        with pytest.raises(StorageError, match="Not a directory") as caught:
            act()
        assert f"{tmp_path / 'file'} is not a directory" in str(caught.value)
    assert everything_in(tmp_path) == ["file"]


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "place").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="place is not a directory"):
        LocalStorage(tmp_path / "place").create("a.bin", [b"x"])


class Forgetful(LocalStorage):
    def read(self, name: str) -> bytes:
        return super().read(name)[:-1]


class Replacing(LocalStorage):
    def claim(self, name: str, data: bytes) -> bool:
        self.remove(name)
        return super().claim(name, data)


class Keeping(LocalStorage):
    kept = True

    def remove(self, name: str) -> bool:
        if self.kept:
            self.kept = False
            return True
        return super().remove(name)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Forgetful, "reads back differently"),
        (Replacing, r"conditional writes .* are ignored there; they decide which attempt owns"),
        (Keeping, "still there after it was deleted"),
    ],
)
def test_a_place_that_cannot_be_trusted_is_refused_by_the_probe(
    tmp_path: Path, kind: type[LocalStorage], message: str
) -> None:
    with pytest.raises(StorageError, match=message):
        kind(tmp_path / "place").probe()


def test_a_probe_leaves_the_place_as_it_was(tmp_path: Path) -> None:
    LocalStorage(tmp_path / "new" / "place").probe()
    assert everything_in(tmp_path) == []
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").write_text("mine")
    LocalStorage(tmp_path / "old").probe()
    assert everything_in(tmp_path) == ["old", "old/notes.txt"]


def test_paths_and_file_urls_are_local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ada")
    assert local_path_of("/data/ck") == Path("/data/ck")
    assert local_path_of("ck/here") == tmp_path / "ck" / "here"
    assert local_path_of("~/ck") == Path("/home/ada/ck")
    assert local_path_of("file:///data/my%20ck") == Path("/data/my ck")
    assert local_path_of("FILE://localhost/data/ck") == Path("/data/ck")
    assert local_path_of("s3://bucket/prefix") is None
    assert open_storage("/data/ck").uri == "/data/ck"
    assert open_storage("file:///data/ck", {}).uri == "/data/ck"


@pytest.mark.parametrize(
    ("uri", "options", "message"),
    [
        ("s3://", None, "names no bucket"),
        ("s3:///x", None, "names no bucket"),
        ("ftp://user:hunter2@host/x", None, r"checkpoint\.uri: ftp:// cannot hold checkpoints"),
        ("", None, "is empty"),
        ("file://", None, "is empty"),
        ("file://node7/data", None, "names a file on the machine node7"),
        ("~nobody-here/ck", None, "write the path in full"),
        ("/data/ck", {"anon": True}, r"checkpoint\.storage_options: anon mean nothing"),
    ],
)
def test_a_place_that_cannot_be_used_is_refused(
    uri: str, options: dict[str, object] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_storage(uri, options)
    assert "hunter2" not in str(caught.value)
