"""The newest checkpoint that counts, against a model that knows everything and is a few lines."""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_helpers import RUN, CutOff, MemoryStorage, flip_a_byte, holds_its_content, save

from trainer.spec.errors import CorruptCheckpoint, Fenced
from trainer.store.checkpoints import CheckpointStore, file_path
from trainer.store.manifest import shard_name


class NewestCheckpoint(RuleBasedStateMachine):
    """Attempts come and go, cut-off ones commit late, bytes rot, files vanish.

    The model: `there` maps a step to the attempt whose manifest lies there, `rotten` and `short`
    are the steps with a flipped byte and with a missing file, `resumes` maps attempts to steps.
    """

    def __init__(self) -> None:
        super().__init__()
        self.store = CheckpointStore(MemoryStorage(), RUN)
        self.there: dict[int, int] = {}
        self.rotten: set[int] = set()
        self.short: set[int] = set()
        self.resumes: dict[int, int | None] = {}

    @initialize()
    def take_the_place(self) -> None:
        self.store.own()

    def counts(self, step: int) -> bool:
        later = [at for attempt, at in self.resumes.items() if attempt > self.there[step]]
        return all(at is not None and step <= at for at in later)

    def best(self, without: set[int]) -> int | None:
        usable = [step for step in self.there if self.counts(step) and step not in without]
        return max(usable, key=lambda step: (self.there[step], step), default=None)

    def is_spoilt(self) -> bool:
        return any(self.counts(step) for step in self.there)

    @rule()
    def claim(self) -> None:
        attempt = len(self.resumes) + 1
        expected = self.best(self.short)
        try:
            claim = self.store.claim_next("job", attempt)
        except CorruptCheckpoint:
            assert expected is None
            assert self.is_spoilt()
            return
        assert claim.attempt == attempt
        assert claim.resume == (None if expected is None else (expected, self.there[expected]))
        self.resumes[attempt] = expected

    @precondition(lambda self: self.resumes)
    @rule(choice=st.integers(0, 3), step=st.integers(1, 12))
    def save(self, choice: int, step: int) -> None:
        """The newest attempt saves, or an older one that sees nothing newer than itself."""
        attempt = max(1, len(self.resumes) - choice)
        store = CheckpointStore(CutOff(self.store.storage, attempt), RUN)
        try:
            save(store, step, attempt)
        except Fenced:
            assert self.there[step] > attempt
            return
        # A replaced manifest that was cut short is found by its bytes, not by the attempt in it.
        assert self.there.get(step, 0) <= attempt
        self.there[step] = attempt
        self.rotten.discard(step)
        self.short.discard(step)

    @precondition(lambda self: self.there)
    @rule(draw=st.randoms(use_true_random=False), vanish=st.booleans())
    def damage(self, draw: random.Random, vanish: bool) -> None:
        step = draw.choice(sorted(self.there))
        if step in self.rotten | self.short:
            return
        manifest = self.store._manifest(step)
        assert manifest is not None
        name = manifest.files[draw.randrange(len(manifest.files))].name
        if vanish:
            self.store.storage.remove(file_path(step, name))
            self.short.add(step)
        else:
            flip_a_byte(self.store, step, name, at=3)
            self.rotten.add(step)

    @precondition(lambda self: self.resumes)
    @rule()
    def sweep(self) -> None:
        self.store.sweep(len(self.resumes))

    @invariant()
    def the_newest_good_one_is_found(self) -> None:
        expected = self.best(self.short | self.rotten)
        try:
            good = self.store.newest_good()
        except CorruptCheckpoint:
            assert expected is None
            assert self.is_spoilt()
            return
        if expected is None:
            assert good is None
            assert not self.is_spoilt()
        else:
            assert good is not None
            assert (good.step, good.attempt) == (expected, self.there[expected])
            assert holds_its_content(self.store, good)
            assert good.manifest.entry(good.manifest.files[0].name).name.startswith(
                shard_name(good.attempt, 0).removesuffix(".bin")
            )

    @invariant()
    def every_step_is_in_one_class(self) -> None:
        survey = self.store.survey()
        assert {ref.step for ref in survey.complete} == {
            step for step in self.there if self.counts(step) and step not in self.short
        }
        assert {one.step for one in survey.ignored} == {
            step for step in self.there if not self.counts(step)
        }
        assert {one.step for one in survey.damaged} == {
            step for step in self.there if self.counts(step) and step in self.short
        }


TestNewestCheckpoint = NewestCheckpoint.TestCase
TestNewestCheckpoint.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
