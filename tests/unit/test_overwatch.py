"""The rank-aware logger: who speaks, and that nothing is started for it."""

from __future__ import annotations

import logging

import pytest

from tests.conftest import run_python
from trainer.overwatch import Overwatch, initialize_overwatch


def on_rank(rank: int) -> Overwatch:
    environ = {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "4"}
    return Overwatch("overwatch", environ)


def test_ranks_come_from_the_launch_variables() -> None:
    third = on_rank(2)
    assert (third.rank(), third.local_rank(), third.world_size()) == (2, 0, 4)
    assert (third.is_rank_zero(), third.is_local_zero()) == (False, True)
    alone = Overwatch("overwatch", {})
    assert (alone.rank(), alone.local_rank(), alone.world_size()) == (0, 0, 1)
    assert alone.is_rank_zero()


def test_rank_zero_tells_and_every_rank_warns(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "overwatch"):
        for rank in (0, 1):
            on_rank(rank).info("rank %d tells", rank)
            on_rank(rank).debug("rank %d details", rank, ctx_level=1)
            on_rank(rank).warning("rank %d warns", rank)
            on_rank(rank).error("rank %d fails", rank)
    assert caplog.messages == [
        "rank 0 tells",
        "    |-> rank 0 details",
        "rank 0 warns",
        "rank 0 fails",
        "rank 1 warns",
        "rank 1 fails",
    ]
    # The line of the caller's own code.
    assert {record.filename for record in caplog.records} == {"test_overwatch.py"}


def test_functions_for_one_rank() -> None:
    for rank, (everywhere, node) in enumerate([(8, 8), (None, None), (None, 8), (None, None)]):
        overwatch = on_rank(rank)
        assert overwatch.rank_zero_only(lambda x: 2 * x)(4) == everywhere
        assert overwatch.local_zero_only(lambda x: 2 * x)(4) == node
        with overwatch.rank_zero_first(), overwatch.local_zero_first():
            pass  # without a process group nobody waits


@pytest.mark.slow
def test_importing_it_starts_no_process_group() -> None:
    said = run_python(
        "import torch.distributed as dist\n"
        "import trainer.strategies.build\n"
        "from trainer.overwatch import initialize_overwatch\n"
        "overwatch = initialize_overwatch('x')\n"
        "print(dist.is_initialized(), overwatch.rank(), overwatch.world_size())",
        {"RANK": "3", "WORLD_SIZE": "8"},
    )
    assert said == "False 3 8\n"


def test_the_name_is_the_loggers() -> None:
    assert initialize_overwatch("a.b").logger is logging.getLogger("a.b")
