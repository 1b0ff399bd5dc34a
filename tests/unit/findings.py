"""What tests of `vitra doctor` ask of its findings."""

from __future__ import annotations

from collections.abc import Iterable

from launcher.findings import Finding, Level


def only(findings: Iterable[Finding], level: Level) -> Finding:
    """The one finding that is not as it should be."""
    (found,) = [finding for finding in findings if finding.level is not Level.OK]
    assert found.level is level, found
    assert found.fix
    assert bool(found.exit_code) == (level is Level.FAULT)
    return found
