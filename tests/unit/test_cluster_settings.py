"""The test cluster's settings and files, without a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slurm.conf import slurm_conf
from slurm.processes import Daemons, start_time
from slurm.settings import ClusterError, Settings, current_settings

COMMAND = Path(__file__).parents[2] / "slurm" / "cluster"


def test_the_environment_sets_them(tmp_path: Path) -> None:
    given = {"SC_STATE": str(tmp_path), "SC_GRACE": "0", "SC_ACCT": "none", "SC_PORT": "30000"}
    settings = Settings.from_environ(given, nodes=2)
    assert (settings.grace_s, settings.accounting, settings.slurmdbd_port) == (0, False, 30_002)
    assert settings.node_names == ["node1", "node2"]
    settings.save()
    assert current_settings(given) == settings


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SC_PORT", "many"),
        ("SC_NODES", "0"),
        ("SC_GPUS", "-1"),
        ("SC_ACCT", "sacct"),
        ("SC_NET", "10.79.0.0/24"),
        ("SC_USER", "a user"),
    ],
)
def test_a_setting_that_cannot_be_is_named(name: str, value: str) -> None:
    with pytest.raises(ClusterError, match=name):
        Settings.from_environ({name: value})


def test_configuration_follows_the_settings(tmp_path: Path) -> None:
    text = slurm_conf(Settings(state=tmp_path, nodes=3, accounting=False, net="10.1.2"), "host")
    assert "SlurmctldHost=host(10.1.2.254)" in text
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("NodeName=")] == [
        [f"NodeName=node{n}", f"NodeHostname=node{n}", f"NodeAddr=10.1.2.{n}"] for n in (1, 2, 3)
    ]
    assert "AccountingStorageType=accounting_storage/none" in text
    assert "None" not in text


def test_without_a_cluster_commands_say_so(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, COMMAND, "crash", "node1"],
        env={**os.environ, "SC_STATE": str(tmp_path / "nowhere")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "there is no cluster in" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_reused_pid_is_nobody(tmp_path: Path) -> None:
    daemons = Daemons(tmp_path, tmp_path, {})
    started = start_time(os.getpid())
    assert started is not None
    (tmp_path / "me.pid").write_text(f"{os.getpid()} {started}\n")
    (tmp_path / "other.pid").write_text(f"{os.getpid()} {started - 1}\n")
    assert daemons.pid("me") == os.getpid()
    assert daemons.pid("other") is None
