"""What saving and loading costs: ours beside what else there is, on disk and on S3, in one run.

    python -m tests.bench.storage [--mib 1024] [--home DIRECTORY]

One process saves and loads so many MiB of float32 in tensors of 32 MiB. The S3 server is the tests'
own, on this machine, and shares its cores; `raw` is botocore with parts of 16 MiB, eight at a time,
which is the fastest that plain Python does. boto3's own transfers, with the same parts and threads,
and s3torchconnector are measured where they are installed. Prints MiB/s, and each one's speed as a
share of its reference's: on S3 of raw speed, and in a second column of boto3's.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.s3.server import S3Server
from tests.unit.store_helpers import manifest_of
from trainer.checkpoint.background import pieces
from trainer.checkpoint.codec import (
    HostBuffer,
    index_file,
    load_tensors,
    parse_index,
    stage_tensors,
)
from trainer.store.checkpoints import CheckpointRef, CheckpointStore
from trainer.store.manifest import index_name, shard_name
from trainer.store.storage import Storage, open_storage

_PART = 16 << 20
_PARALLEL = 8
_TENSOR_BYTES = 32 << 20

Tensors = dict[str, Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--home", type=Path, default=None, help="where the files go")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    count = max(1, arguments.mib * (1 << 20) // _TENSOR_BYTES)
    tensors = {f"t{number}": torch.randn(_TENSOR_BYTES // 4) for number in range(count)}
    home = Path(tempfile.mkdtemp(prefix="vitra-bench-", dir=arguments.home))
    server = S3Server(home / "s3")
    try:
        server.start()
        for name, value in server.environ().items():
            os.environ[name] = value
        bench = Bench(tensors, home, server)
        bench.staging()
        bench.disk()
        bench.s3()
    finally:
        server.kill()
        shutil.rmtree(home)


class Bench:
    """The measurements; each prints a row."""

    def __init__(self, tensors: Tensors, home: Path, server: S3Server) -> None:
        self._tensors = tensors
        self._mib = sum(tensor.nbytes for tensor in tensors.values()) / (1 << 20)
        self._home = home
        self._server = server
        self._like = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}

    def staging(self) -> None:
        """How long training stands still for a save in the background."""
        ready = {name: torch.zeros_like(tensor) for name, tensor in self._tensors.items()}
        buffer = HostBuffer(pinned=False)

        def copy() -> None:
            for name, tensor in self._tensors.items():
                ready[name].copy_(tensor)

        def stage() -> None:
            stage_tensors(self._tensors, shard_name="s", buffer=buffer, group=None)

        stage()
        copied = self._row("copy into ready memory", _best(copy), None)
        self._row("background save: stall", _best(stage), copied)
        self._row("torch.save: stall", _best(self._torch_save), copied)

    def disk(self) -> None:
        places: list[Path] = []

        def dcp_save() -> None:
            # Into a new place, two being kept, as ours: blocks that were just freed are faster.
            places.append(self._home / f"dcp-{len(places)}")
            dcp.save(self._tensors, checkpoint_id=str(places[-1]), no_dist=True)
            if len(places) > 2:
                shutil.rmtree(places[-3])

        def mapped() -> None:
            saved = torch.load(self._home / "torch.pt", mmap=True)
            for name, tensor in saved.items():
                self._like[name].copy_(tensor)

        save, load, verify = self._ours(str(self._home / "ours"))
        saves = [(_timed(dcp_save), _timed(save)) for _ in range(4)]  # in turns: disks have moods
        reference = self._row("disk: dcp.save", min(of_dcp for of_dcp, _ in saves), None)
        self._row("disk: our save", min(ours for _, ours in saves), reference)
        reference = self._row("disk: torch.load(mmap) and copy", _best(mapped), None)
        dcp_load = _best(lambda: dcp.load(self._like, checkpoint_id=str(places[-1]), no_dist=True))
        self._row("disk: dcp.load", dcp_load, reference)
        self._row("disk: our load", _best(load), reference)
        self._row("disk: our check of every byte", _best(verify), reference)

    def s3(self) -> None:
        from botocore.config import Config
        from botocore.session import Session

        client = Session().create_client("s3", config=Config(max_pool_connections=_PARALLEL))
        bucket = self._server.bucket
        client.create_bucket(Bucket=bucket)
        data = torch.cat([tensor.view(torch.uint8) for tensor in self._tensors.values()]).numpy()

        def raw_save() -> None:
            key = {"Bucket": bucket, "Key": "raw"}
            upload = client.create_multipart_upload(**key)["UploadId"]

            def send(number: int) -> dict[str, Any]:
                body = data[number * _PART : (number + 1) * _PART].tobytes()
                part = {"UploadId": upload, "PartNumber": number + 1}
                tag = client.upload_part(Body=body, **part, **key)["ETag"]
                return {"PartNumber": number + 1, "ETag": tag}

            with ThreadPoolExecutor(_PARALLEL) as pool:
                parts = [*pool.map(send, range(-(-len(data) // _PART)))]
            client.complete_multipart_upload(
                UploadId=upload, MultipartUpload={"Parts": parts}, **key
            )

        def raw_load() -> None:
            def fetch(start: int) -> None:
                ranged = f"bytes={start}-{start + _PART - 1}"
                client.get_object(Bucket=bucket, Key="raw", Range=ranged)["Body"].read()

            with ThreadPoolExecutor(_PARALLEL) as pool:
                list(pool.map(fetch, range(0, len(data), _PART)))

        save, load, verify = self._ours(f"s3://{bucket}/ours")
        saves, loads = {"raw write": raw_save}, {"raw read": raw_load}
        if find_spec("boto3"):
            saves["boto3 upload_fileobj"], loads["boto3 download_fileobj"] = self._boto3(data)
        saves["our save"] = save
        loads |= {"our load": load, "our check of every byte": verify}
        raw_saved = self._rows_in_turns(saves)
        raw_loaded = self._rows_in_turns(loads)
        if find_spec("s3torchconnector"):
            self._connector(f"s3://{bucket}/connector/", raw_saved, raw_loaded)
        self._fsspec(f"s3://{bucket}", raw_saved, raw_loaded)

    def _boto3(self, data: Any) -> tuple[Callable[[], None], Callable[[], None]]:
        """boto3's own way to save the data and to load it."""
        import boto3
        from boto3.s3.transfer import TransferConfig

        client = boto3.client("s3")
        bucket = self._server.bucket
        config = TransferConfig(multipart_chunksize=_PART, max_concurrency=_PARALLEL)

        def save() -> None:
            client.upload_fileobj(io.BytesIO(data), bucket, "boto3", Config=config)

        def load() -> None:
            client.download_fileobj(bucket, "boto3", io.BytesIO(), Config=config)

        return save, load

    def _connector(self, place: str, raw_saved: float, raw_loaded: float) -> None:
        from s3torchconnector import S3ClientConfig
        from s3torchconnector.dcp import S3StorageReader, S3StorageWriter

        config = S3ClientConfig(force_path_style=True)
        made = {
            "region": os.environ["AWS_DEFAULT_REGION"],
            "path": place,
            "s3client_config": config,
        }
        os.environ["AWS_REGION"] = os.environ["AWS_DEFAULT_REGION"]

        def save() -> None:
            dcp.save(self._tensors, storage_writer=S3StorageWriter(**made), no_dist=True)

        def load() -> None:
            dcp.load(self._like, storage_reader=S3StorageReader(**made), no_dist=True)

        self._row("S3: dcp.save, s3torchconnector", _best(save, 2), raw_saved)
        self._row("S3: dcp.load, s3torchconnector", _best(load, 2), raw_loaded)

    def _fsspec(self, place: str, raw_saved: float, raw_loaded: float) -> None:
        from s3fs import S3FileSystem
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

        fs = S3FileSystem()

        def torch_save() -> None:
            with fs.open(f"{place}/torch.pt", "wb") as file:
                torch.save(self._tensors, file)

        def torch_load() -> None:
            with fs.open(f"{place}/torch.pt", "rb") as file:
                torch.load(file)

        def dcp_save() -> None:
            dcp.save(self._tensors, storage_writer=FsspecWriter(f"{place}/dcp"), no_dist=True)

        def dcp_load() -> None:
            dcp.load(self._like, storage_reader=FsspecReader(f"{place}/dcp"), no_dist=True)

        self._row("S3: torch.save through s3fs", _best(torch_save, 1), raw_saved)
        self._row("S3: torch.load through s3fs", _best(torch_load, 1), raw_loaded)
        self._row("S3: dcp.save through fsspec", _best(dcp_save, 1), raw_saved)
        self._row("S3: dcp.load through fsspec", _best(dcp_load, 1), raw_loaded)

    def _torch_save(self) -> None:
        with (self._home / "torch.pt").open("wb") as file:
            torch.save(self._tensors, file)
            os.fsync(file.fileno())

    def _ours(self, uri: str) -> tuple[Callable[[], None], Callable[[], None], Callable[[], None]]:
        """A save, with digests, manifest and retention; a load of it; a check of it."""
        store = CheckpointStore(open_storage(uri), "bench-1")
        store.own()
        store.claim_next(None, None)
        saved: list[CheckpointRef] = []
        buffer = HostBuffer(pinned=False)

        def save() -> None:
            step = len(saved) + 1
            staged = stage_tensors(
                self._tensors, shard_name=shard_name(1, 0), buffer=buffer, group=None
            )
            assert staged.data is not None
            shard = store.create_file(step, staged.name, pieces(staged.data))
            index = staged.index_of({staged.name: shard.name})
            saved.append(_committed(store, step, index, shard))
            store.retain(1, keep_last=2, keep_every=None, resumed_step=None)

        def load() -> None:
            ref = saved[-1]
            sizes = {entry.name: entry.size_bytes for entry in ref.manifest.files}
            index, _ = parse_index(store.storage.read(ref.path(index_file(sizes))), sizes)
            _load(self._like, index, store.storage, ref)
            assert torch.equal(self._like["t0"], self._tensors["t0"])

        def verify() -> None:
            assert store.verify(saved[-1]) == []

        return save, load, verify

    def _rows_in_turns(self, acts: dict[str, Callable[[], None]]) -> float:
        """Rows of acts that are taken in turns, three times: servers, too, have moods.

        Each beside the first, and beside boto3's where that is one of them; returns the first's.
        """
        rounds = [[_timed(act) for act in acts.values()] for _ in range(3)]
        best = dict(zip(acts, map(min, zip(*rounds, strict=True)), strict=True))
        first = next(iter(best.values()))
        boto3 = next((s for what, s in best.items() if what.startswith("boto3")), None)
        for what, seconds in best.items():
            self._row(f"S3: {what}", seconds, first, boto3)
        return first

    def _row(self, what: str, seconds: float, *references: float | None) -> float:
        shares = "".join(f"{one / seconds:8.2f}" for one in references if one is not None)
        sys.stdout.write(f"{what:34}{seconds:9.3f} s{self._mib / seconds:9.0f} MiB/s{shares}\n")
        sys.stdout.flush()
        return seconds


def _committed(
    store: CheckpointStore, step: int, index: dict[str, Any], shard: Any
) -> CheckpointRef:
    entry = store.create_file(step, index_name(1), [json.dumps(index).encode()])
    manifest = manifest_of(step, 1, (shard, entry), store.run_id)
    store.commit(manifest)
    return CheckpointRef(manifest)


def _load(tensors: Tensors, index: Any, storage: Storage, ref: CheckpointRef) -> None:
    def read(name: str, start: int, target: memoryview) -> int:
        return storage.read_into(ref.path(name), start, target)

    load_tensors(tensors, index, read=read, group=None)


def _best(act: Callable[[], object], times: int = 3) -> float:
    """The shortest time of a few, in seconds."""
    return min(_timed(act) for _ in range(times))


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
