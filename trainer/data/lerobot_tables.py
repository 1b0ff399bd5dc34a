"""Everything of a LeRobot v3.0 data set but its pixels, read and checked as a whole.

    meta/info.json                 version, frame rate, features, the templates of file names
    meta/stats.json                the range of each feature
    meta/tasks.parquet             the instructions
    meta/episodes/*/*.parquet      one row an episode: which rows and which part of which video
    data/*/*.parquet               one row a frame: state, action, time, task

N: frames of the data set, D: state dimensions, A: action dimensions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.data.normalize import MinMax
from trainer.spec.errors import DataError


@dataclass(frozen=True)
class Episode:
    """Frames `start` to `start + length - 1`, shown in `video` from `video_start_s` on."""

    number: int
    start: int
    length: int
    task: int
    video: Path
    video_start_s: float


@dataclass(frozen=True)
class Tables:
    """A LeRobot data set without its pixels, in the data's own units."""

    fps: float
    height: int
    width: int
    instructions: tuple[str, ...]
    state_range: MinMax
    action_range: MinMax
    episodes: tuple[Episode, ...]
    states: np.ndarray  # (N, D) float32
    actions: np.ndarray  # (N, A) float32
    tasks: np.ndarray  # (N,) int64
    times_s: np.ndarray  # (N,) float64, from the start of the frame's episode


@dataclass(frozen=True)
class Keys:
    """The features to read; `image` None is the first video feature."""

    state: str
    action: str
    image: str | None


def read_tables(root: Path, keys: Keys) -> Tables:
    """Read and check the data set below `root`.

    Raises:
        DataError: a file or feature is missing, damaged, of another version, or contradicts
            another file. Names the file and the key.
    """
    info = _read_info(root)
    features = _mapping(root / "meta/info.json", info, "features")
    image_key, height, width = _image_feature(root, features, keys.image)
    state_dim = _vector_dim(root, features, keys.state)
    action_dim = _vector_dim(root, features, keys.action)
    stats = _read_json(root / "meta/stats.json")
    instructions = _read_instructions(root / "meta/tasks.parquet")

    rows = _read_episode_rows(root, image_key)
    columns = _read_frames(root, info, rows, {keys.state: state_dim, keys.action: action_dim})
    tasks = columns["task_index"]
    if len(tasks) and not 0 <= tasks.min() <= tasks.max() < len(instructions):
        raise DataError(
            f"{root}: frames of task {tasks.max()}, but meta/tasks.parquet lists"
            f" {len(instructions)} tasks"
        )
    episodes = _episodes(root, info, rows, image_key, columns)
    return Tables(
        fps=float(info["fps"]),
        height=height,
        width=width,
        instructions=instructions,
        state_range=_range(root / "meta/stats.json", stats, keys.state, state_dim),
        action_range=_range(root / "meta/stats.json", stats, keys.action, action_dim),
        episodes=episodes,
        states=columns[keys.state],
        actions=columns[keys.action],
        tasks=tasks,
        times_s=columns["timestamp"].astype(np.float64),
    )


# ------------------------------------------------------------------ meta/*.json


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise DataError(
            f"{path}: missing", "data.options.root must be a LeRobot v3.0 data set"
        ) from err
    except (OSError, ValueError) as err:
        raise DataError(f"{path}: cannot be read: {err}") from err
    if not isinstance(found, dict):
        raise DataError(f"{path}: holds no JSON object")
    return found


def _read_info(root: Path) -> dict[str, Any]:
    path = root / "meta/info.json"
    info = _read_json(path)
    version = info.get("codebase_version")
    if not (isinstance(version, str) and version.startswith("v3.")):
        raise DataError(
            f"{path}: codebase_version is {version!r}; this reader reads v3.0",
            "convert older data sets with LeRobot's own converter",
        )
    for key in ("data_path", "video_path"):
        if not isinstance(info.get(key), str):
            raise DataError(f"{path}: {key} is {info.get(key)!r}, not a template of file names")
    fps = info.get("fps")
    if isinstance(fps, bool) or not isinstance(fps, int | float) or not fps > 0:
        raise DataError(f"{path}: fps is {fps!r}, not a positive number")
    return info


def _mapping(path: Path, parent: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = parent.get(key)
    if not isinstance(found, dict):
        raise DataError(f"{path}: {key} is missing")
    return found


def _feature(root: Path, features: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    if not isinstance(features.get(key), dict):
        raise DataError(
            f"{root / 'meta/info.json'}: no feature {key!r}", f"it has {', '.join(features)}"
        )
    return features[key]


def _image_feature(
    root: Path, features: Mapping[str, Any], key: str | None
) -> tuple[str, int, int]:
    """The key, height and width of the camera to read."""
    path = root / "meta/info.json"
    if key is None:
        videos = [
            k for k, f in features.items() if isinstance(f, dict) and f.get("dtype") == "video"
        ]
        if not videos:
            raise DataError(f"{path}: no feature of dtype video; images in parquet are not read")
        key = videos[0]
    feature = _feature(root, features, key)
    if feature.get("dtype") != "video":
        raise DataError(
            f"{path}: feature {key!r} has dtype {feature.get('dtype')!r};"
            " cameras are read from video only"
        )
    match feature.get("shape"):
        case [int(height), int(width), 1 | 3] | [3, int(height), int(width)]:
            return key, height, width
        case shape:
            raise DataError(f"{path}: feature {key!r} has shape {shape!r}, not that of an image")


def _vector_dim(root: Path, features: Mapping[str, Any], key: str) -> int:
    match _feature(root, features, key).get("shape"):
        case [int(dim)] if dim > 0:
            return dim
        case shape:
            raise DataError(
                f"{root / 'meta/info.json'}: feature {key!r} has shape {shape!r}; only vectors"
                " are read"
            )


def _range(path: Path, stats: Mapping[str, Any], key: str, dim: int) -> MinMax:
    stat = _mapping(path, stats, key)
    try:
        found = MinMax.of(stat["min"], stat["max"])
    except (KeyError, TypeError, ValueError) as err:
        raise DataError(f"{path}: no usable min and max of {key!r}: {err}") from err
    if len(found.low) != dim:
        raise DataError(f"{path}: {key!r} has {len(found.low)} dimensions, info.json says {dim}")
    return found


# --------------------------------------------------------------------- parquet


def _read_parquet(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """The file's columns; `None` reads all."""
    try:
        with pq.ParquetFile(path) as file:
            missing = [name for name in columns or () if name not in file.schema_arrow.names]
            if missing:
                raise DataError(f"{path}: no column {missing[0]!r}")
            return file.read(columns=None if columns is None else list(columns))
    except FileNotFoundError as err:
        raise DataError(f"{path}: missing") from err
    except (pa.ArrowException, OSError) as err:
        raise DataError(f"{path}: cannot be read: {err}") from err


def _numbers(path: Path, table: pa.Table, key: str, dtype: type[np.generic]) -> np.ndarray:
    """A column of numbers as (rows,), of lists of them as (rows, length of each)."""
    column = table.column(key).combine_chunks()
    if column.null_count:
        raise DataError(f"{path}: column {key!r} has empty cells")
    try:
        if not pa.types.is_nested(column.type):
            return column.to_numpy(zero_copy_only=False).astype(dtype)
        values = column.flatten().to_numpy(zero_copy_only=False).astype(dtype)
    except (pa.ArrowException, TypeError, ValueError) as err:
        raise DataError(f"{path}: column {key!r} holds no numbers: {err}") from err
    lengths = np.diff(column.offsets.to_numpy()) if hasattr(column, "offsets") else None
    if lengths is not None and len(lengths) and lengths.min() != lengths.max():
        raise DataError(f"{path}: the lists of column {key!r} differ in length")
    return values.reshape(table.num_rows, -1) if table.num_rows else values.reshape(0, 0)


def _read_instructions(path: Path) -> tuple[str, ...]:
    """The instruction of each task; it lies in the index of a pandas frame or in a column."""
    table = _read_parquet(path)
    column = "task" if "task" in table.column_names else "__index_level_0__"
    for name in ("task_index", column):
        if name not in table.column_names:
            raise DataError(f"{path}: no column {name!r}")
    numbers = _numbers(path, table, "task_index", np.int64).tolist()
    texts = dict(zip(numbers, table.column(column).to_pylist(), strict=True))
    if not texts or sorted(texts) != list(range(len(numbers))):
        raise DataError(f"{path}: task_index must run from 0 without a gap, found {numbers}")
    return tuple(str(texts[number]) for number in range(len(texts)))


# ------------------------------------------------------------- episodes, frames

_ROW_COLUMNS = (
    "episode_index",
    "length",
    "dataset_from_index",
    "dataset_to_index",
    "data/chunk_index",
    "data/file_index",
)
_FRAME_COLUMNS = {
    "index": np.int64,
    "episode_index": np.int64,
    "frame_index": np.int64,
    "task_index": np.int64,
    "timestamp": np.float32,
}


def _read_episode_rows(root: Path, image_key: str) -> dict[str, np.ndarray]:
    """The columns that say where each episode lies, in order of episode_index."""
    paths = sorted(root.glob("meta/episodes/*/*.parquet"))
    if not paths:
        raise DataError(f"{root / 'meta/episodes'}: no parquet files")
    video = [
        f"videos/{image_key}/{name}" for name in ("chunk_index", "file_index", "from_timestamp")
    ]
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*_ROW_COLUMNS, *video)}
    for path in paths:
        table = _read_parquet(path, list(parts))
        for name, columns in parts.items():
            dtype = np.float64 if name.endswith("from_timestamp") else np.int64
            columns.append(_numbers(path, table, name, dtype))
    rows = {name: np.concatenate(columns) for name, columns in parts.items()}
    order = np.argsort(rows["episode_index"], kind="stable")
    return {name: column[order] for name, column in rows.items()}


def _read_frames(
    root: Path, info: Mapping[str, Any], rows: Mapping[str, np.ndarray], vectors: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """All frames of all data files in order of `index`, which must run from 0 without a gap."""
    places = sorted(
        set(zip(rows["data/chunk_index"].tolist(), rows["data/file_index"].tolist(), strict=True))
    )
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*_FRAME_COLUMNS, *vectors)}
    for chunk, file in places:
        path = _place(root, info, "data_path", chunk, file)
        table = _read_parquet(path, list(parts))
        for name, columns in parts.items():
            column = _numbers(path, table, name, _FRAME_COLUMNS.get(name, np.float32))
            if name in vectors:
                column = _checked_vectors(path, name, column, vectors[name])
            columns.append(column)
    frames = {name: np.concatenate(columns) for name, columns in parts.items()}
    order = np.argsort(frames["index"], kind="stable")
    frames = {name: column[order] for name, column in frames.items()}
    total = int(rows["length"].sum())
    if not np.array_equal(frames["index"], np.arange(total)):
        raise DataError(
            f"{root / 'data'}: the column index of the parquet files must run from 0 to"
            f" {total - 1}, the frames that meta/episodes lists; {len(frames['index'])} were found"
        )
    return frames


def _checked_vectors(path: Path, key: str, values: np.ndarray, dim: int) -> np.ndarray:
    values = values.reshape(len(values), -1)
    if values.shape[1] != dim:
        raise DataError(f"{path}: {key!r} has {values.shape[1]} dimensions, info.json says {dim}")
    bad = ~np.isfinite(values).all(axis=1)
    if bad.any():
        raise DataError(f"{path}: {key!r} of row {int(bad.argmax())} is not finite")
    return values


def _place(
    root: Path, info: Mapping[str, Any], template: str, chunk: int, file: int, video_key: str = ""
) -> Path:
    try:
        name = info[template].format(chunk_index=chunk, file_index=file, video_key=video_key)
    except (KeyError, IndexError, ValueError) as err:
        raise DataError(
            f"{root / 'meta/info.json'}: {template} {info[template]!r} is no template of"
            " chunk_index, file_index and video_key"
        ) from err
    return root / name


def _episodes(
    root: Path,
    info: Mapping[str, Any],
    rows: Mapping[str, np.ndarray],
    image_key: str,
    frames: Mapping[str, np.ndarray],
) -> tuple[Episode, ...]:
    episodes: list[Episode] = []
    for row in range(len(rows["episode_index"])):
        number, start, stop, length = (
            int(rows[name][row])
            for name in ("episode_index", "dataset_from_index", "dataset_to_index", "length")
        )
        mine = slice(start, stop)
        if (
            length < 1
            or stop - start != length
            or not np.array_equal(frames["frame_index"][mine], np.arange(length))
            or (frames["episode_index"][mine] != number).any()
        ):
            raise DataError(
                f"{root / 'meta/episodes'}: episode {number} should be frames {start} to"
                f" {stop - 1}, but the data files say otherwise"
            )
        chunk, file = (int(rows[f"videos/{image_key}/{n}_index"][row]) for n in ("chunk", "file"))
        video = _place(root, info, "video_path", chunk, file, image_key)
        if not video.is_file():
            raise DataError(f"{video}: missing", f"episode {number} is in it")
        episodes.append(
            Episode(
                number=number,
                start=start,
                length=length,
                task=int(frames["task_index"][start]),
                video=video,
                video_start_s=float(rows[f"videos/{image_key}/from_timestamp"][row]),
            )
        )
    if not episodes:
        raise DataError(f"{root / 'meta/episodes'}: lists no episodes")
    return tuple(episodes)
