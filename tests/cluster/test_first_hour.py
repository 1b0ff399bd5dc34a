"""The whole way of a stranger, from an empty environment to a preempted run that has finished."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.cluster.handle import ClusterHandle

_SCRIPT = Path(__file__).parents[1] / "e2e" / "first_hour.sh"
#: It takes a minute. Its own waits are shorter than this.
_WITHIN_S = 280.0


def test_the_first_hour(cluster: ClusterHandle, wheel: Path) -> None:
    """As an ordinary user, who cannot read the checkout and has no vitra but the wheel's."""
    script, own_wheel = cluster.share / _SCRIPT.name, cluster.share / wheel.name
    shutil.copy(_SCRIPT, script)
    shutil.copy(wheel, own_wheel)
    for path in (script, own_wheel):
        path.chmod(0o755)
    (packages,) = cluster.user_venv.glob("lib/python*/site-packages")
    environ = {
        "PYTHON": str(cluster.user_venv / "bin" / "python"),
        "PACKAGES": str(packages),
        "WHEEL": str(own_wheel),
        "WHERE": str(cluster.share / "hour"),
    }
    answer = cluster.run(
        ["bash", script], user=cluster.user, environ=environ, code=None, within_s=_WITHIN_S
    )
    assert answer.code == 0, answer.stdout + answer.stderr
    assert cluster.queue() == []
