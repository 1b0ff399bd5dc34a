"""What ranks tell the supervisor of how far they are: one small datagram, repeated.

A beat says where a rank stands, not that it lives, so a lost one is made good by the next, an old
one changes nothing, and none is judged by its sender's clock. It is sealed with the attempt's own
key: neither a stranger on the network nor a rank of an older attempt can speak for a rank.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from enum import IntEnum

#: Tells a rank where to send its beats: "HOST PORT KEY", the key in hex.
PULSE_VARIABLE = "VITRA_PULSE"

_BODY = struct.Struct("!IQBQ")
_SEAL_BYTES = 16
#: The longest datagram that can be a beat.
BEAT_BYTES = _BODY.size + _SEAL_BYTES

#: What is not a step may take this long, however short the steps are.
_PATIENCE_S = 3600.0


def patience_s(hang_timeout_s: float) -> float:
    """How long start-up, a save or an evaluation may take without a sign of progress, in seconds.

    The limits of single collectives must be longer: it is the supervisor that judges a hang.
    """
    return max(_PATIENCE_S, 2.0 * hang_timeout_s)


class Phase(IntEnum):
    """What a rank is doing, in the order in which one number of finished steps sees it."""

    STARTING = 0
    JOINING = 1
    PREPARING = 2
    SAVING = 3
    LOADING = 4
    COMPUTING = 5
    EVALUATING = 6
    DONE = 7


@dataclass(frozen=True, order=True)
class Place:
    """How far a rank is in the program that all ranks run; of two, the smaller is behind.

    `step` is the last finished optimizer step; `mark` counts the marks passed in this phase.
    """

    step: int = 0
    phase: Phase = Phase.STARTING
    mark: int = 0


@dataclass(frozen=True)
class Beat:
    """One rank's place, as a datagram carries it."""

    rank: int
    place: Place

    def seal(self, key: bytes) -> bytes:
        """The datagram."""
        place = self.place
        body = _BODY.pack(self.rank, place.step, place.phase, place.mark)
        return body + _seal(body, key)

    @classmethod
    def open(cls, data: bytes, key: bytes) -> Beat | None:
        """The beat in a datagram; None if it is not one, or was not sealed with this key."""
        body, seal = data[: _BODY.size], data[_BODY.size :]
        if len(data) != BEAT_BYTES or not hmac.compare_digest(seal, _seal(body, key)):
            return None
        rank, step, phase, mark = _BODY.unpack(body)
        return cls(rank, Place(step, Phase(phase), mark))


def _seal(body: bytes, key: bytes) -> bytes:
    return hmac.digest(key, body, "sha256")[:_SEAL_BYTES]
