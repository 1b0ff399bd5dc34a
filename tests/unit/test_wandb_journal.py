"""Reading back wandb's own file: every whole record, whatever the blocks, the end, the growth."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.wandb_journal import Journal, records

_BLOCK = 32768
_HEADER = b":W&B\xe1\xbe\x00"


def framed(contents: list[bytes]) -> bytes:
    """A file as LevelDB's log format describes it, with checksums left out."""
    out = bytearray(_HEADER)
    for content in contents:
        rest, first = content, True
        while True:
            left = _BLOCK - len(out) % _BLOCK
            if left < 7:
                out += bytes(left)
                continue
            part, rest = rest[: left - 7], rest[left - 7 :]
            kind = {(True, True): 1, (True, False): 2, (False, False): 3, (False, True): 4}[
                first, not rest
            ]
            out += bytes(4) + len(part).to_bytes(2, "little") + bytes([kind]) + part
            first = False
            if not rest:
                break
    return bytes(out)


def row(step: int, padding: int = 0) -> bytes:
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()
    record.history.step.num = step
    record.history.item.add(key="x", value_json='"' + "." * padding + '"')
    return record.SerializeToString()


def other() -> bytes:
    from wandb.proto import wandb_internal_pb2

    record = wandb_internal_pb2.Record()
    record.run.run_id = "r"
    return record.SerializeToString()


@pytest.mark.parametrize("size", [1, 100, _BLOCK - 14, _BLOCK - 7, _BLOCK, 3 * _BLOCK + 5])
def test_every_record_is_read_whatever_the_blocks(size: int) -> None:
    contents = [bytes([number]) * (size + number % 9) for number in range(1, 40)]
    read = list(records(framed(contents), len(_HEADER)))
    assert [content for _, content in read] == contents


def test_a_block_may_end_in_padding() -> None:
    """Each first record ends 0 to 8 bytes before the end of its block."""
    for gap in range(9):
        contents = [b"a" * (_BLOCK - len(_HEADER) - 7 - gap), b"b" * 50]
        data = framed(contents)
        assert [content for _, content in records(data, len(_HEADER))] == contents


def test_the_highest_step_of_a_growing_file(tmp_path: Path) -> None:
    path = tmp_path / "run-r.wandb"
    journal = Journal(path)
    assert journal.highest_step() == 0, "there is no file yet"
    contents = [other(), row(1, 20_000), row(2, 20_000), other(), row(3, 70_000), other()]
    data = framed(contents)
    ends = [end for end, _ in records(data, len(_HEADER))]
    steps = [0, 1, 2, 2, 3, 3]
    for size in range(0, len(data), 997):
        path.write_bytes(data[:size])
        whole = [step for step, end in zip(steps, ends, strict=True) if end <= size]
        assert journal.highest_step() == max(whole, default=0), size
    path.write_bytes(data)
    assert journal.highest_step() == 3
    journal.sync()


def test_torn_at_any_byte_it_holds_what_is_whole(tmp_path: Path) -> None:
    data = framed([row(1), row(2)])
    (first, _), (second, _) = records(data, len(_HEADER))
    path = tmp_path / "run-r.wandb"
    for size in range(len(data) + 1):
        # A lost power supply leaves zeros where data was to be.
        for tail in (b"", bytes(20)):
            path.write_bytes(data[:size] + tail)
            expected = 0 if size < first else 1 if size < second else 2
            assert Journal(path).highest_step() == expected, (size, tail)


def test_mended_it_ends_with_a_whole_record(tmp_path: Path) -> None:
    data = framed([other(), row(1), row(2, 40_000)])
    ends = [end for end, _ in records(data, len(_HEADER))]
    path = tmp_path / "run-r.wandb"
    for size in [*range(ends[1] + 9), *range(ends[1] + 9, len(data), 997), len(data)]:
        path.write_bytes(data[:size])
        journal = Journal(path)
        journal.mend()
        whole = [end for end in ends if end <= size]
        if whole:
            assert path.read_bytes() == data[: whole[-1]], size
            assert journal.highest_step() == len(whole) - 1
        else:
            assert not path.exists(), "it does not say whose it is"


def test_a_file_in_another_form_holds_nothing_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "run-r.wandb"
    content = b"XXXX" + framed([row(5)])[4:]
    path.write_bytes(content)
    journal = Journal(path)
    assert journal.highest_step() == 0
    journal.mend()
    assert path.read_bytes() == content
