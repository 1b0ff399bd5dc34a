"""The LeRobot v3.0 reader, on the packaged data set and on one written here."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from trainer.components import Dataset
from trainer.data.keyed import SampleRandom
from trainer.data.lerobot import LerobotData, build, hold_out, packaged_root
from trainer.data.lerobot_tables import Episode
from trainer.data.normalize import MinMax
from trainer.data.samples import HoldsOut
from trainer.data.video import VideoReader, Wanted
from trainer.spec.errors import DataError

RNG = SampleRandom(seed=0, epoch=0, sample=0)
CAMERA = "observation.images.wrist"
FPS = 10
SIZE = 32


@pytest.fixture(scope="module")
def packaged() -> LerobotData:
    return build({}, seed=0)


def packaged_rows() -> dict[str, np.ndarray]:
    """The packaged data set's frames as they lie in its parquet file."""
    table = pq.read_table(packaged_root() / "data/chunk-000/file-000.parquet")
    return {name: np.array(table.column(name).to_pylist()) for name in table.column_names}


# --------------------------------------------------------- a data set written here


def grey(frame: int) -> int:
    """What frame `frame` shows, all over; far enough from its neighbours to survive coding."""
    return 20 + 37 * frame % 200


def write_frames(path: Path, frames: list[np.ndarray]) -> None:
    """Encode (H, W, 3) uint8 pictures with a key frame at every fourth."""
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"crf": "10", "g": "4", "bf": "0", "threads": "1"}
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=FPS, options=options)
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())


def write_video(path: Path, frames: list[int]) -> None:
    write_frames(path, [np.full((SIZE, SIZE, 3), grey(f), dtype=np.uint8) for f in frames])


def write_table(path: Path, columns: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


#: Frames of each of the episodes, its task, and the number of the files that it lies in.
EPISODES = ((5, 0, 0), (7, 1, 0), (6, 0, 1), (4, 1, 1))
TASKS = ("lift the cup", "drop the cup")


def action_of(frame: int) -> list[float]:
    return [frame / 10.0, 3.0, -float(frame)]


def write_data_set(root: Path) -> Path:
    """Two cameras, two files of each kind in two chunks, a constant action dimension."""
    total = sum(length for length, _, _ in EPISODES)
    vector = {"dtype": "float32", "names": None}
    camera = {"dtype": "video", "shape": [SIZE, SIZE, 3], "names": ["height", "width", "channels"]}
    info = {
        "codebase_version": "v3.0",
        "fps": FPS,
        "data_path": "data/part-{chunk_index:02d}/rows-{file_index}.parquet",
        "video_path": "videos/{video_key}/part-{chunk_index:02d}/film-{file_index}.mp4",
        "features": {
            "observation.state": {**vector, "shape": [2]},
            "action": {**vector, "shape": [3]},
            CAMERA: camera,
            "observation.images.top": camera,
            "picture": {**camera, "dtype": "image"},
        },
    }
    actions = np.array([action_of(frame) for frame in range(total)])
    stats = {
        "action": {"min": actions.min(0).tolist(), "max": actions.max(0).tolist()},
        "observation.state": {"min": [0.0, -1.0], "max": [float(total), 1.0]},
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    (root / "meta/stats.json").write_text(json.dumps(stats))
    write_table(root / "meta/tasks.parquet", {"task_index": [1, 0], "task": TASKS[::-1]})

    start = 0
    shown: dict[int, list[int]] = {0: [], 1: []}
    rows: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for number, (length, task, file) in enumerate(EPISODES):
        where = {
            "episode_index": [number],
            "length": [length],
            "dataset_from_index": [start],
            "dataset_to_index": [start + length],
            "data/chunk_index": [file],
            "data/file_index": [file],
        }
        for key in (CAMERA, "observation.images.top"):
            where[f"videos/{key}/chunk_index"] = [file]
            where[f"videos/{key}/file_index"] = [file]
            where[f"videos/{key}/from_timestamp"] = [len(shown[file]) / FPS]
        write_table(root / f"meta/episodes/chunk-000/file-{number:03d}.parquet", where)
        for t in range(length):
            frame = start + t
            rows[file].append(
                {
                    "index": frame,
                    "episode_index": number,
                    "frame_index": t,
                    "task_index": task,
                    "timestamp": t / FPS,
                    "observation.state": [float(frame), 0.5],
                    "action": action_of(frame),
                }
            )
            shown[file].append(frame)
        start += length
    for file in (0, 1):
        path = root / f"data/part-{file:02d}/rows-{file}.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(rows[file]), path)
        write_video(root / f"videos/{CAMERA}/part-{file:02d}/film-{file}.mp4", shown[file])
        inverse = [frame + 100 for frame in shown[file]]
        write_video(
            root / f"videos/observation.images.top/part-{file:02d}/film-{file}.mp4", inverse
        )
    return root


def opened(root: Path, **options: Any) -> LerobotData:
    return build({"root": str(root), "holdout_episodes": 0, **options}, seed=0)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data_set(tmp_path_factory.mktemp("original") / "set")


@pytest.fixture
def root(original: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(original, tmp_path / "set"))


def test_several_files_chunks_and_cameras(original: Path) -> None:
    for camera, offset in ((None, 0), ("observation.images.top", 100)):
        for cache_mb in (0, 1):
            data = opened(original, chunk=3, image_key=camera, cache_mb=cache_mb)
            assert len(data) == 22
            for index in np.random.default_rng(0).permutation(22).tolist():
                image = data.sample(index, RNG)["image"]
                assert image.shape == (3, SIZE, SIZE)
                assert np.abs(image.astype(int) - grey(index + offset)).max() <= 3
    assert data.meta.instructions == TASKS
    assert data.meta.fps == FPS
    assert data.sample(6, RNG)["task"] == 1


def test_images_are_scaled_on_request(original: Path) -> None:
    data = opened(original, image_size=16)
    assert data.meta.image_shape == (3, 16, 16)
    assert np.abs(data.sample(2, RNG)["image"].astype(int) - grey(2)).max() <= 3


def test_constant_dimensions_are_zero_and_come_back(original: Path) -> None:
    data = opened(original, chunk=1)
    actions = np.stack([data.sample(index, RNG)["action"][0] for index in range(len(data))])
    assert (actions[:, 1] == 0).all()
    assert actions.min() == -1.0
    assert actions.max() == 1.0
    expected = [action_of(frame) for frame in range(22)]
    np.testing.assert_allclose(data.meta.action.restore(actions), expected, atol=1e-5)


# ------------------------------------------------------------- the packaged data set


def test_packaged_data_set_offers_the_protocols(packaged: LerobotData) -> None:
    assert isinstance(packaged, Dataset)
    assert isinstance(packaged, HoldsOut)
    assert len(packaged) + packaged.held_out == 1947
    assert len(packaged.meta.instructions) == 4


def test_chunks_and_masks_are_the_rows_of_the_parquet_file(packaged: LerobotData) -> None:
    rows = packaged_rows()
    held_out = set(range(7, 32, 8))
    frames = [f for f, e in enumerate(rows["episode_index"]) if e not in held_out]
    assert len(frames) == len(packaged)
    for index, frame in enumerate(frames):
        sample = packaged.sample(index, RNG)
        same_episode = rows["episode_index"][frame : frame + 16] == rows["episode_index"][frame]
        valid = int(same_episode.sum())
        assert sample["mask"].tolist() == [t < valid for t in range(16)]
        restored = packaged.meta.action.restore(sample["action"])
        expected = rows["action"][frame : frame + valid]
        np.testing.assert_allclose(restored[:valid], expected, atol=1e-6)
        assert (restored[valid:] == restored[valid - 1]).all()
        state = packaged.meta.state.restore(sample["state"])
        np.testing.assert_allclose(state, rows["observation.state"][frame], atol=1e-6)
        assert sample["task"] == rows["task_index"][frame]
        assert sample["index"] == index


def test_any_frame_is_what_sequential_decoding_shows(packaged: LerobotData) -> None:
    with av.open(str(next(packaged_root().rglob("*.mp4")))) as container:
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    rows = packaged_rows()
    frames = [f for f, e in enumerate(rows["episode_index"]) if e % 8 != 7]
    uncached = build({"cache_mb": 0}, seed=0)
    for index in np.random.default_rng(1).permutation(len(packaged))[:10].tolist():
        expected = shown[frames[index]].transpose(2, 0, 1)
        np.testing.assert_array_equal(packaged.sample(index, RNG)["image"], expected)
        np.testing.assert_array_equal(uncached.sample(index, RNG)["image"], expected)


def test_held_out_episodes_are_the_last_of_each_task(packaged: LerobotData) -> None:
    rows = packaged_rows()
    frames = [f for f, e in enumerate(rows["episode_index"]) if e in (7, 15, 23, 31)]
    assert packaged.held_out == len(frames)
    for number, frame in enumerate(frames):
        sample = packaged.held_out_sample(number)
        restored = packaged.meta.action.restore(sample["action"][0])
        np.testing.assert_allclose(restored, rows["action"][frame], atol=1e-6)
        assert sample["index"] == len(packaged) + number


def test_task_means_are_of_the_training_frames(packaged: LerobotData) -> None:
    rows = packaged_rows()
    training = rows["episode_index"] % 8 != 7
    for task in range(4):
        mine = rows["action"][training & (rows["task_index"] == task)]
        expected = packaged.meta.action.normalize(mine.mean(axis=0))
        np.testing.assert_allclose(packaged.task_mean_action[task], expected, atol=1e-5)


def episodes(tasks: list[int]) -> list[Episode]:
    return [Episode(n, n, 1, task, Path("v.mp4"), 0.0) for n, task in enumerate(tasks)]


@pytest.mark.parametrize(
    ("tasks", "count", "expected"),
    [
        ([0, 0, 1, 1], 2, (1, 3)),
        ([0, 1, 0, 1], 3, (0, 2, 3)),
        ([2, 2, 2], 2, (1, 2)),
        ([0, 0, 0, 1], 3, (1, 2, 3)),
        ([0, 1], 0, ()),
        ([0, 1], 5, (0, 1)),
    ],
)
def test_hold_out(tasks: list[int], count: int, expected: tuple[int, ...]) -> None:
    assert hold_out(episodes(tasks), count) == expected


# The child only decodes and leaves; data workers are forked in the same way.
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_process_reads_with_its_own_decoder() -> None:
    data = build({"cache_mb": 0}, seed=0)
    order = np.random.default_rng(2).permutation(len(data))[:20].tolist()
    expected = [data.sample(index, RNG)["image"] for index in order]
    child = os.fork()
    if child == 0:
        good = all(
            np.array_equal(data.sample(index, RNG)["image"], image)
            for index, image in zip(order, expected, strict=True)
        )
        os._exit(0 if good else 1)
    for index, image in zip(order, expected, strict=True):
        np.testing.assert_array_equal(data.sample(index, RNG)["image"], image)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# ------------------------------------------------------------------- what goes wrong


def change_info(**changes: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "meta/info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def change_feature(key: str, **changes: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        info = json.loads((root / "meta/info.json").read_text())
        info["features"][key] |= changes
        (root / "meta/info.json").write_text(json.dumps(info))

    return change


def change_stats(key: str, value: Any) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        path = root / "meta/stats.json"
        stats = json.loads(path.read_text())
        del stats[key]
        path.write_text(json.dumps({**stats, **({key: value} if value else {})}))

    return change


def change_column(name: str, column: str, values: list[Any] | None) -> Callable[[Path], None]:
    """Replace the first cells of a column in a parquet file, or drop the column."""

    def change(root: Path) -> None:
        table = pq.read_table(root / name)
        cells = table.column(column).to_pylist()
        place = table.column_names.index(column)
        table = table.remove_column(place)
        if values is not None:
            table = table.append_column(column, [values + cells[len(values) :]])
        pq.write_table(table, root / name)

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).unlink()


def cut(name: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        content = (root / name).read_bytes()
        (root / name).write_bytes(content[: len(content) // 2])

    return change


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_text(content) and None


def shorten_video(root: Path) -> None:
    write_video(root / FILM, list(range(11)))


def damage_video(root: Path) -> None:
    content = bytearray((root / FILM).read_bytes())
    payload = content.index(b"mdat") + len(content) // 3
    content[payload : payload + 64] = bytes(64)
    (root / FILM).write_bytes(content)


ROWS = "data/part-00/rows-0.parquet"
EPISODE = "meta/episodes/chunk-000/file-001.parquet"
FILM = f"videos/{CAMERA}/part-00/film-0.mp4"


@pytest.mark.parametrize(
    ("breaking", "named"),
    [
        (remove("meta/info.json"), ["meta/info.json: missing", "data.options.root"]),
        (write("meta/info.json", "{"), ["meta/info.json: cannot be read"]),
        (write("meta/info.json", "[]"), ["meta/info.json: holds no JSON object"]),
        (change_info(codebase_version="v2.1"), ["codebase_version is 'v2.1'", "v3.0"]),
        (change_info(codebase_version=3), ["codebase_version is 3"]),
        (change_info(data_path=None), ["data_path is None"]),
        (change_info(data_path="d/{nonsense}"), ["data_path 'd/{nonsense}' is no template"]),
        (change_info(fps=0), ["fps is 0"]),
        (change_info(features=None), ["features is missing"]),
        (change_feature("action", shape=[2]), ["'action' has 3 dimensions", "2"]),
        (change_feature("action", shape=[2, 3]), ["'action' has shape [2, 3]"]),
        (change_feature(CAMERA, shape=[SIZE]), [CAMERA, "not that of an image"]),
        (change_feature(CAMERA, shape=[SIZE, 64, 3]), [FILM, "frame 0 is 32x32", "64x32"]),
        (remove("meta/stats.json"), ["meta/stats.json: missing"]),
        (change_stats("action", None), ["meta/stats.json: action is missing"]),
        (change_stats("action", {"min": [1.0]}), ["meta/stats.json", "'action'", "'max'"]),
        (change_stats("action", {"min": [1, 1, 1], "max": [0, 0, 0]}), ["[1.0, 0.0] is no range"]),
        (change_stats("action", {"min": [0], "max": [1]}), ["has 1 dimensions"]),
        (remove("meta/tasks.parquet"), ["meta/tasks.parquet: missing"]),
        (write("meta/tasks.parquet", "PAR1"), ["meta/tasks.parquet: cannot be read"]),
        (change_column("meta/tasks.parquet", "task", None), ["tasks.parquet: no column"]),
        (change_column("meta/tasks.parquet", "task_index", [5]), ["without a gap", "[5, 0]"]),
        (lambda root: shutil.rmtree(root / "meta/episodes"), ["meta/episodes: no parquet"]),
        (cut(EPISODE), [f"{EPISODE}: cannot be read"]),
        (change_column(EPISODE, "length", None), [EPISODE, "no column 'length'"]),
        (change_column(EPISODE, "length", [6]), ["data: the column index"]),
        (change_column(EPISODE, "dataset_from_index", [4]), ["episode 1 should be frames 4 to 11"]),
        (remove(ROWS), [f"{ROWS}: missing"]),
        (cut(ROWS), [f"{ROWS}: cannot be read"]),
        (change_column(ROWS, "timestamp", None), [ROWS, "no column 'timestamp'"]),
        (change_column(ROWS, "action", [[0.0, 1.0, float("nan")]]), [ROWS, "'action' of row 0"]),
        (change_column(ROWS, "action", [[0.0]]), [ROWS, "'action' differ in length"]),
        (change_column(ROWS, "action", [None]), [ROWS, "'action' has empty cells"]),
        (change_column(ROWS, "index", [7]), ["index of the parquet files must run from 0 to 21"]),
        (change_column(ROWS, "task_index", [2]), ["frames of task 2", "lists 2 tasks"]),
        (change_column(ROWS, "episode_index", [3]), ["episode 0 should be frames 0 to 4"]),
        (remove(FILM), [f"{FILM}: missing", "episode 0"]),
        (write(FILM, "no film"), [FILM, "frame 0 cannot be decoded"]),
        (shorten_video, [f"{FILM}: no frame at 1.100 s, wanted for frame 11"]),
        (damage_video, [FILM, "frame "]),
    ],
)
def test_faults_are_named(root: Path, breaking: Callable[[Path], None], named: list[str]) -> None:
    breaking(root)
    with pytest.raises(DataError) as caught:
        opened(root)
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"image_key": "observation.images.left"}, ["'observation.images.left'", CAMERA]),
        ({"image_key": "picture"}, ["'picture' has dtype 'image'"]),
        ({"state_key": "state"}, ["no feature 'state'", "observation.state"]),
        ({"holdout_episodes": 4}, ["holdout_episodes=4", "4 episodes", "at most 3"]),
    ],
)
def test_options_that_do_not_fit_the_data(
    original: Path, options: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        opened(original, **options)
    for part in named:
        assert part in str(caught.value)


def test_a_frame_damaged_later_is_named_when_it_is_read(root: Path) -> None:
    data = opened(root, cache_mb=0)
    shorten_video(root)
    assert data.sample(10, RNG)["image"].shape == (3, SIZE, SIZE)
    with pytest.raises(DataError, match=r"film-0\.mp4: no frame at 1\.100 s, wanted for frame 11"):
        data.sample(11, RNG)


def test_a_frame_that_the_decoder_painted_over_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "film.mp4"
    blocks = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    texture = np.kron(blocks, np.ones((8, 8, 1), dtype=np.uint8))
    write_frames(path, [np.roll(texture, 5 * shift, axis=1) for shift in range(12)])
    reader = VideoReader(64, 64, FPS)
    whole = [reader.read(path, Wanted(frame / FPS, frame)) for frame in range(12)]
    reader.close()
    with av.open(str(path)) as container:
        packet = next(p for p in container.demux(video=0) if p.pts == 5 * p.duration)
        middle, size = packet.pos + packet.size // 2, packet.size // 4
    content = bytearray(path.read_bytes())
    content[middle : middle + size] = b"\xff" * size
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"film\.mp4: frame 5 is damaged"):
        reader.read(path, Wanted(5 / FPS, 5))
    for frame in (3, 8):
        np.testing.assert_array_equal(reader.read(path, Wanted(frame / FPS, frame)), whole[frame])


# ----------------------------------------------------------------------- normalisation


def test_normalisation_maps_the_range_to_one_and_back() -> None:
    scale = MinMax.of([-2.0, 5.0, 0.0], [4.0, 5.0, 1e-9])
    values = np.array([[-2.0, 5.0, 0.0], [4.0, 5.0, 1e-9], [1.0, 5.0, 0.0]], dtype=np.float32)
    normalised = scale.normalize(values)
    assert normalised.dtype == np.float32
    np.testing.assert_allclose(normalised, [[-1, 0, 0], [1, 0, 0], [0, 0, 0]])
    np.testing.assert_allclose(scale.restore(normalised), values, atol=1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [([0.0], [0.0, 1.0]), ([1.0], [0.0]), ([float("nan")], [1.0])]
)
def test_impossible_ranges_are_refused(low: list[float], high: list[float]) -> None:
    with pytest.raises(ValueError, match=r"bounds|range"):
        MinMax.of(low, high)
