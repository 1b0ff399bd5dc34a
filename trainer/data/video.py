"""Frames out of video files, by their time."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import av
import numpy as np
from av.error import FFmpegError

from trainer.spec.errors import DataError

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer

#: Containers kept open at a time; opening one costs milliseconds, each holds a file descriptor.
_MAX_OPEN = 16


@dataclass(frozen=True)
class Wanted:
    """The frame shown at `time_s` of a video; `frame` is its number in the data set."""

    time_s: float
    frame: int


class VideoReader:
    """Decodes frames of equal size from any number of video files.

    Containers stay open between calls, in each process its own.

    Args:
        height, width: of the frames in the files, in pixels.
        fps: frames a second; a frame counts as the one wanted within half a frame's time.
        resize: the side of the square that frames are scaled to; None leaves them as they are.
    """

    def __init__(self, height: int, width: int, fps: float, resize: int | None = None) -> None:
        self._size = (height, width)
        self._tolerance_s = 0.5 / fps
        self._resize = resize
        self._open: OrderedDict[Path, InputContainer] = OrderedDict()
        self._owner = os.getpid()

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """(3, H, W) of the decoded frames."""
        height, width = (self._resize, self._resize) if self._resize else self._size
        return 3, height, width

    def read(self, path: Path, wanted: Wanted) -> np.ndarray:
        """One frame as (3, H, W) uint8 RGB.

        Raises:
            DataError: as `read_in_order`.
        """
        return next(self.read_in_order(path, [wanted]))

    def read_in_order(self, path: Path, wanted: Sequence[Wanted]) -> Iterator[np.ndarray]:
        """Yield the frames, which must be in ascending order of time, in one pass of the decoder.

        Raises:
            DataError: the file is missing, is no video, ends too early, has no frame at a time
                asked for, or a frame is damaged. Names the file and the frame.
        """
        if not wanted:
            return
        frames = self._frames_from(path, wanted[0].time_s)
        shown: tuple[float, VideoFrame] | None = None
        for one in wanted:
            try:
                while shown is None or shown[0] < one.time_s - self._tolerance_s:
                    shown = next(frames)
            except StopIteration:
                raise _no_frame(path, one) from None
            except (FFmpegError, OSError) as err:
                self.close()
                raise DataError(
                    f"{path}: frame {one.frame} cannot be decoded: {err.strerror}"
                ) from err
            if shown[0] > one.time_s + self._tolerance_s:
                raise _no_frame(path, one)
            yield self._pixels(path, shown[1], one)

    def close(self) -> None:
        """Close this process's containers; they are opened again when needed."""
        for container in self._open.values():
            container.close()
        self._open.clear()
        self._owner = os.getpid()

    def _frames_from(self, path: Path, time_s: float) -> Iterator[tuple[float, VideoFrame]]:
        """All frames with their times, from the last key frame at or before `time_s` on."""
        container = self._container(path)
        stream = container.streams.video[0]
        assert stream.time_base is not None, "the stream of an opened file has a time base"
        container.seek(max(0, round(time_s / stream.time_base)), stream=stream)
        for frame in container.decode(stream):
            if frame.time is None:
                raise DataError(f"{path}: its frames carry no time")
            yield frame.time, frame

    def _container(self, path: Path) -> InputContainer:
        if self._owner != os.getpid():
            # Inherited over a fork: the position in the file is shared with the parent.
            self.close()
        if path in self._open:
            self._open.move_to_end(path)
            return self._open[path]
        container = av.open(str(path))
        if not container.streams.video:
            container.close()
            raise DataError(f"{path}: holds no video")
        # One thread: ranks and data workers share the cores, and threads do not survive a fork.
        container.streams.video[0].codec_context.thread_count = 1
        self._open[path] = container
        if len(self._open) > _MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return container

    def _pixels(self, path: Path, frame: VideoFrame, wanted: Wanted) -> np.ndarray:
        if frame.is_corrupt:  # the decoder painted over the damage
            raise DataError(f"{path}: frame {wanted.frame} is damaged")
        if (frame.height, frame.width) != self._size:
            height, width = self._size
            raise DataError(
                f"{path}: frame {wanted.frame} is {frame.width}x{frame.height} pixels,"
                f" meta/info.json says {width}x{height}"
            )
        if self._resize:
            frame = frame.reformat(self._resize, self._resize, "rgb24", interpolation="AREA")
        pixels = frame.to_ndarray(format="rgb24")
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))


def _no_frame(path: Path, wanted: Wanted) -> DataError:
    return DataError(f"{path}: no frame at {wanted.time_s:.3f} s, wanted for frame {wanted.frame}")
