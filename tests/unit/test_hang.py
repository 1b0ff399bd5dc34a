"""When ranks count as hung, and who is blamed."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from launcher.hang import Hang, HangWatch, Limits, blame
from trainer.spec.pulse import Phase, Place

LIMITS = Limits(step_s=30, first_step_s=90, patience_s=3600, leave_s=300)


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """Two ranks under a watch that looks at them every second."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.watch = HangWatch(2, LIMITS, self.clock)
        self.places: dict[int, Place] = {}
        self.ended: list[int] = []
        self.logged_bytes = 0

    def at(
        self, step: int, phase: Phase, *, ranks: tuple[int, ...] = (0, 1), mark: int = 0
    ) -> None:
        for rank in ranks:
            self.places[rank] = Place(step, phase, mark)

    def look(self) -> str | None:
        return self.watch.look(self.places, self.ended, self.logged_bytes)

    def idle(self, seconds: int) -> str | None:
        """What the watch says after so long without news; None only if it never said anything."""
        for _ in range(seconds):
            self.clock.now += 1
            said = self.look()
            if said:
                return said
        return None

    def train_to(self, step: int) -> None:
        for done in range(step + 1):
            self.at(done, Phase.LOADING)
            assert self.idle(1) is None


@pytest.fixture
def ranks() -> Watched:
    return Watched()


def test_a_step_within_the_limit_is_progress(ranks: Watched) -> None:
    for step in range(50):
        ranks.at(step, Phase.COMPUTING)
        assert ranks.idle(29) is None


def test_no_step_for_too_long(ranks: Watched) -> None:
    ranks.train_to(3)
    assert ranks.idle(30) is None
    assert ranks.idle(1) == "no step was finished within 30 s"


def test_what_goes_on_within_a_step_is_no_progress(ranks: Watched) -> None:
    ranks.train_to(3)
    said = None
    for mark in range(40):
        ranks.at(3, Phase.COMPUTING if mark % 2 else Phase.LOADING, mark=mark)
        said = said or ranks.idle(1)
    assert said == "no step was finished within 30 s"


def test_the_first_step_of_an_attempt_may_take_longer(ranks: Watched) -> None:
    ranks.at(12, Phase.LOADING)
    assert ranks.idle(90) is None
    assert ranks.idle(2) == "no first step was finished within 90 s"


def test_a_step_of_one_rank_ends_the_first_one_s_grace(ranks: Watched) -> None:
    ranks.at(12, Phase.LOADING)
    assert ranks.idle(1) is None
    ranks.at(13, Phase.LOADING, ranks=(0,))
    assert ranks.idle(30) is None
    assert ranks.idle(2) == "no step was finished within 30 s"


@pytest.mark.parametrize(
    ("phase", "what"),
    [
        (Phase.STARTING, "training did not begin"),
        (Phase.JOINING, "training did not begin"),
        (Phase.PREPARING, "training did not begin"),
        (Phase.SAVING, "step 3 was not saved"),
        (Phase.EVALUATING, "the model was not evaluated"),
    ],
)
def test_what_is_no_step_has_its_own_limit(ranks: Watched, phase: Phase, what: str) -> None:
    ranks.train_to(3)
    ranks.at(3, phase)
    assert ranks.idle(3600) is None
    assert ranks.idle(2) == f"{what} within 3600 s"


def test_a_rank_that_is_still_saving_keeps_the_others_limit_long(ranks: Watched) -> None:
    ranks.train_to(3)
    ranks.at(3, Phase.SAVING, ranks=(1,))
    assert ranks.idle(1000) is None


def test_steps_go_on_after_a_long_save(ranks: Watched) -> None:
    ranks.train_to(3)
    ranks.at(3, Phase.SAVING)
    assert ranks.idle(3000) is None
    ranks.at(3, Phase.LOADING)
    assert ranks.idle(30) is None
    assert ranks.idle(2) is not None


def test_ranks_that_have_left_leave_the_others_some_minutes(ranks: Watched) -> None:
    ranks.train_to(3)
    ranks.ended = [0]
    assert ranks.idle(300) is None
    assert ranks.idle(2) == "the first rank has left, and not all others within 300 s"


def test_without_heartbeats_the_metrics_show_progress(ranks: Watched) -> None:
    for _ in range(3):
        ranks.logged_bytes += 100
        assert ranks.idle(3600) is None
    assert ranks.idle(2) == "no heartbeat came, and no step was logged within 3600 s"


def test_metrics_are_progress_where_heartbeats_are_lost_on_the_way(ranks: Watched) -> None:
    ranks.train_to(3)
    for _ in range(20):
        ranks.logged_bytes += 100
        assert ranks.idle(29) is None


def test_only_the_supervisor_s_own_clock_counts(
    ranks: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the wall clock jumps, there or back."""
    ranks.train_to(3)
    for wall in (0.0, 4e9, -5.0, 1e9):
        monkeypatch.setattr(time, "time", lambda wall=wall: wall)
        assert ranks.idle(7) is None
    assert ranks.idle(3) == "no step was finished within 30 s"


def test_time_in_which_nobody_watched_does_not_count(ranks: Watched) -> None:
    """A suspended machine: the ranks get a moment to show that they are alive."""
    ranks.train_to(3)
    ranks.clock.now += 100_000
    assert ranks.look() is None
    ranks.at(4, Phase.LOADING)
    assert ranks.idle(30) is None


def test_limits_follow_the_hang_timeout() -> None:
    default, short, long = (Limits.of(seconds) for seconds in (1800, 5, 7200))
    assert (default.step_s, short.step_s, long.step_s) == (1800, 5, 7200)
    assert (default.patience_s, short.patience_s, long.patience_s) == (3600, 3600, 14400)
    for limits in (default, short, long):
        assert limits.step_s < limits.first_step_s < limits.patience_s


# -- Who is to blame -------------------------------------------------------------------------------


def blamed(places: Mapping[int, Place], running: int = 3, silent: tuple[int, ...] = ()) -> Hang:
    return blame("it hangs", places, range(running), silent)


def all_at(place: Place, **others: Place) -> dict[int, Place]:
    return dict.fromkeys(range(3), place) | {int(name[1:]): p for name, p in others.items()}


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(7, Phase.LOADING, 4), "waiting for the data of step 8"),
        (Place(7, Phase.COMPUTING, 1), "computing step 8"),
        (Place(7, Phase.SAVING), "saving step 7"),
        (Place(6, Phase.COMPUTING, 9), "computing step 7"),
    ],
)
def test_the_one_that_is_behind(place: Place, words: str) -> None:
    hang = blamed(all_at(Place(7, Phase.COMPUTING, 2), r1=place))
    assert hang.ranks == (1,)
    assert hang.why == f"kept the others waiting; it was {words}"


def test_one_never_heard_of_is_behind_all() -> None:
    places = all_at(Place(0, Phase.JOINING))
    del places[2]
    assert blamed(places) == Hang(
        "it hangs", (2,), "kept the others waiting; it was still starting up"
    )


def test_a_silent_one_is_to_blame_wherever_it_was() -> None:
    hang = blamed(all_at(Place(7, Phase.COMPUTING), r0=Place(7, Phase.LOADING)), silent=(2,))
    assert hang.ranks == (2,)
    assert "no sign of life" in hang.why


def test_when_all_are_silent_the_place_decides() -> None:
    hang = blamed(all_at(Place(7, Phase.COMPUTING), r1=Place(7, Phase.LOADING)), silent=(0, 1, 2))
    assert hang.ranks == (1,)


def test_nobody_stands_out() -> None:
    hang = blamed(all_at(Place(7, Phase.SAVING)))
    assert (hang.ranks, hang.why) == ((), "were saving step 7")


def test_a_rank_alone() -> None:
    hang = blamed({0: Place(2, Phase.EVALUATING)}, running=1, silent=(0,))
    assert (hang.ranks, hang.why) == ((0,), "was evaluating the model")


def test_those_that_had_left_are_not_asked() -> None:
    places = all_at(Place(9, Phase.DONE), r0=Place(3, Phase.LOADING))
    hang = blame("it hangs", places, [1, 2], ())
    assert (hang.ranks, hang.why) == ((), "were done, and did not leave")


def test_nothing_is_known_without_heartbeats() -> None:
    assert blamed({}).ranks == ()
    assert blamed({}, silent=(1,)).ranks == (1,)
