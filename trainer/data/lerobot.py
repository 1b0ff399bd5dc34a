"""Training samples from a data set in LeRobot v3.0 format: one for each frame of its episodes.

Sample t of an episode is what the camera and the joints showed at frame t, the instruction, and the
next `chunk` actions from t on; `trainer.data.samples` lists the fields.

Format: https://huggingface.co/docs/lerobot/lerobot-dataset-v3
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from trainer.components import Batch, Sample
from trainer.data.keyed import SampleRandom
from trainer.data.lerobot_tables import Episode, Keys, Tables, read_tables
from trainer.data.samples import DataMeta, stack
from trainer.data.video import VideoReader, Wanted
from trainer.spec.errors import DataError
from trainer.spec.options import LerobotOptions


def build(options: Mapping[str, Any], seed: int) -> LerobotData:  # noqa: ARG001 - nothing is random
    """The data set that `options` (see `LerobotOptions`) describe; `root` unset: the packaged one.

    Raises:
        DataError: it cannot be read, or leaves nothing to train on.
    """
    opts = LerobotOptions.model_validate(options)
    root = Path(opts.root) if opts.root else packaged_root()
    tables = read_tables(root, Keys(opts.state_key, opts.action_key, opts.image_key))
    return LerobotData(root, tables, opts)


def packaged_root() -> Path:
    """Where the demonstrations lie that come with the package."""
    return Path(str(files("trainer.data"))) / "metaworld_mini"


def hold_out(episodes: Sequence[Episode], count: int) -> tuple[int, ...]:
    """Which episodes (positions in `episodes`, ascending) are kept out of the training data.

    Task by task in turn, each gives its last episode, then its last but one, and so on, until there
    are `count`: every task is judged as evenly as the number allows, and nothing is random.
    """
    by_task: defaultdict[int, list[int]] = defaultdict(list)
    for position, episode in enumerate(episodes):
        by_task[episode.task].append(position)
    chosen: list[int] = []
    while len(chosen) < min(count, len(episodes)):
        for task in sorted(by_task):
            if by_task[task] and len(chosen) < count:
                chosen.append(by_task[task].pop())
    return tuple(sorted(chosen))


class LerobotData:
    """A LeRobot v3.0 data set as training samples; offers `Dataset` and `HoldsOut`.

    When all its frames fit into `cache_mb` they are decoded at once here, so that data workers
    share them; else each frame is decoded whenever it is asked for.

    Raises:
        DataError: no episode is left to train on, or a frame cannot be decoded.
    """

    def __init__(self, root: Path, tables: Tables, options: LerobotOptions) -> None:
        held_out = hold_out(tables.episodes, options.holdout_episodes)
        if len(held_out) == len(tables.episodes):
            raise DataError(
                f"{root}: data.options.holdout_episodes={options.holdout_episodes} leaves none of"
                f" its {len(tables.episodes)} episodes to train on",
                f"use at most {len(tables.episodes) - 1}",
            )
        self._tables = tables
        self._episode_of_frame = np.empty(len(tables.tasks), dtype=np.int64)
        for position, episode in enumerate(tables.episodes):
            mine = slice(episode.start, episode.start + episode.length)
            self._episode_of_frame[mine] = position
        kept_out = np.isin(self._episode_of_frame, held_out)
        self._training_frames = np.flatnonzero(~kept_out)
        self._held_out_frames = np.flatnonzero(kept_out)

        self._reader = VideoReader(tables.height, tables.width, tables.fps, options.image_size)
        self.meta = DataMeta(
            image_shape=self._reader.image_shape,
            chunk=options.chunk,
            fps=tables.fps,
            instructions=tables.instructions,
            state=tables.state_range,
            action=tables.action_range,
        )
        self._states = self.meta.state.normalize(tables.states)
        self._actions = self.meta.action.normalize(tables.actions)
        self.task_mean_action = self._mean_actions()
        self._images = self._decode_all(options.cache_mb)

    @property
    def held_out(self) -> int:
        return len(self._held_out_frames)

    def __len__(self) -> int:
        return len(self._training_frames)

    def sample(self, index: int, rng: SampleRandom) -> Sample:  # noqa: ARG002 - nothing is random
        try:
            return self._at(int(self._training_frames[index]), index)
        except DataError as err:
            raise DataError(f"sample {index}: {err.message}", err.hint) from err

    def held_out_sample(self, number: int) -> Sample:
        """Held-out sample `number`; its `index` goes on from the training samples'."""
        return self._at(int(self._held_out_frames[number]), len(self) + number)

    def collate(self, samples: Sequence[Sample]) -> Batch:
        return stack(samples)

    def _at(self, frame: int, index: int) -> Sample:
        episode = self._tables.episodes[self._episode_of_frame[frame]]
        last = episode.start + episode.length - 1
        steps = np.arange(frame, frame + self.meta.chunk)
        return {
            "image": self._image(frame),
            "state": self._states[frame],
            "task": np.asarray(self._tables.tasks[frame]),
            "action": self._actions[np.minimum(steps, last)],
            "mask": steps <= last,
            "index": np.asarray(index, dtype=np.int64),
        }

    def _image(self, frame: int) -> np.ndarray:
        if self._images is not None:
            return self._images[frame]
        episode = self._tables.episodes[self._episode_of_frame[frame]]
        return self._reader.read(episode.video, self._wanted(episode, frame))

    def _wanted(self, episode: Episode, frame: int) -> Wanted:
        return Wanted(episode.video_start_s + float(self._tables.times_s[frame]), frame)

    def _decode_all(self, cache_mb: int) -> np.ndarray | None:
        """(N, 3, H, W) uint8, or None where that is more than `cache_mb` MiB."""
        shape = (len(self._tables.tasks), *self.meta.image_shape)
        if np.prod(shape, dtype=np.int64) > cache_mb * 2**20:
            return None
        images = np.empty(shape, dtype=np.uint8)
        by_video: defaultdict[Path, list[Wanted]] = defaultdict(list)
        for episode in self._tables.episodes:
            for frame in range(episode.start, episode.start + episode.length):
                by_video[episode.video].append(self._wanted(episode, frame))
        for video, wanted in by_video.items():
            wanted.sort(key=lambda w: w.time_s)
            decoded = self._reader.read_in_order(video, wanted)
            for one, image in zip(wanted, decoded, strict=True):
                images[one.frame] = image
        self._reader.close()
        return images

    def _mean_actions(self) -> np.ndarray:
        """(tasks, A) float32 over the training frames; the mean of all for a task without any."""
        tasks = self._tables.tasks[self._training_frames]
        actions = self._actions[self._training_frames].astype(np.float64)
        means = np.tile(actions.mean(axis=0), (len(self.meta.instructions), 1))
        for task in np.unique(tasks):
            means[task] = actions[tasks == task].mean(axis=0)
        return means.astype(np.float32)
