"""What a save in the background says, and when."""

from __future__ import annotations

import threading

import pytest

from trainer.checkpoint.background import BackgroundSave, Warn, persist
from trainer.spec.errors import StorageError


def test_an_error_that_passes_is_said_once_when_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trainer.checkpoint.background._PAUSES_S", (0.0, 0.0))
    tries: list[int] = []
    failed, go_on = threading.Event(), threading.Event()

    def upload() -> str:
        tries.append(len(tries))
        if len(tries) == 3:
            failed.set()
            assert go_on.wait(60)
            return "written"
        raise StorageError("no answer")

    def write(warn: Warn) -> None:
        assert persist(upload, what="step 4", warn=warn) == "written"

    save = BackgroundSave(4, write)
    assert failed.wait(60)
    assert caplog.messages == []
    assert [*save.warnings()] == ["step 4 is not saved so far, and is tried again: no answer"]
    assert [*save.warnings()] == []
    go_on.set()
    assert save.wait() is None
    assert [*save.warnings()] == []
    assert tries == [0, 1, 2]


def test_an_error_that_stays_is_what_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.checkpoint.background._PAUSES_S", (0.0,))

    def upload() -> None:
        raise StorageError("no answer")

    save = BackgroundSave(4, lambda warn: persist(upload, what="step 4", warn=warn))
    assert isinstance(save.wait(), StorageError)
    assert len([*save.warnings()]) == 1
