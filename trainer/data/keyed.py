"""Randomness without state: every draw is a pure function of what it is drawn for.

A draw that belongs to a sample (augmentation, diffusion noise, timesteps, condition dropout) comes
from a counter-based generator keyed by (seed, epoch, sample, repeat, purpose). It is therefore the
same at any world size, in any worker process and after any resume.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np


def keyed_generator(*key: int | str) -> np.random.Generator:
    """A Philox generator whose 128-bit key is the blake2b digest of `key`.

    The parts are encoded with their type and length, so that no two different keys collide by
    concatenation. numpy promises the streams of Philox per numpy version; the version is recorded
    with the run.
    """
    digest = hashlib.blake2b(digest_size=16)
    for part in key:
        data = part.encode() if isinstance(part, str) else str(int(part)).encode()
        kind = b"s" if isinstance(part, str) else b"i"
        digest.update(kind + len(data).to_bytes(4, "little") + data)
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "little")))


@dataclass(frozen=True)
class SampleRandom:
    """All randomness that belongs to one sample in one epoch.

    Draw arrays of a fixed, contiguous shape: the values a generator gives depend on the shape asked
    for, never on who asks.
    """

    seed: int
    epoch: int
    sample: int

    def generator(self, purpose: str, repeat: int = 0) -> np.random.Generator:
        """The stream for one purpose ("noise", "timestep", ...) and one repeat of the sample."""
        return keyed_generator(self.seed, self.epoch, self.sample, repeat, purpose)
