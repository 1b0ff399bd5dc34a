"""Profiles: what all runs on a cluster have in common, given by its users and by its site.

`--profile NAME` is NAME.yaml in the site's directory, in the user's, or in both. A spec says more
than the user's file, and that more than the site's.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from launcher.load import Profile, read_file
from trainer.spec.errors import UsageError
from trainer.spec.rundir import RunDir, write_atomic

#: Where a site keeps its profiles.
SITE_VARIABLE = "VITRA_SITE_PROFILES"
_SITE = "/etc/vitra/profiles"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def find_profiles(name: str, environ: Mapping[str, str]) -> list[Profile]:
    """The files of a profile, the site's first.

    Raises:
        UsageError: there is none of this name. SpecError: one cannot be read.
    """
    places = _places(environ)
    if not _NAME.fullmatch(name):
        raise UsageError(f"--profile {name!r} is no name", "use letters, digits, . _ and -")
    files = [place / f"{name}.yaml" for place in places]
    found = [Profile(read_file(file, str(file)), str(file)) for file in files if file.exists()]
    if not found:
        known = sorted({file.stem for place in places for file in place.glob("*.yaml")})
        raise UsageError(
            f"--profile {name}: there is none in {' or '.join(map(str, places))}",
            f"known: {', '.join(known)}" if known else "a profile is a part of a spec, NAME.yaml",
        )
    return found


def keep_profiles(run_dir: RunDir, profiles: Iterable[Profile]) -> None:
    """Put copies into a run directory, for its resumes; nothing where there are none."""
    for number, profile in enumerate(profiles, 1):
        run_dir.profiles.mkdir(exist_ok=True, mode=0o750)
        write_atomic(run_dir.profiles / f"{number}.yaml", profile.text)


def kept_profiles(run_dir: RunDir) -> list[Profile]:
    """What `keep_profiles` has put there, the lowest first. Raises SpecError: unreadable."""
    numbers = sorted(int(p.stem) for p in run_dir.profiles.glob("*.yaml") if p.stem.isdigit())
    files = [run_dir.profiles / f"{number}.yaml" for number in numbers]
    return [Profile(read_file(file, str(file)), str(file)) for file in files]


def _places(environ: Mapping[str, str]) -> tuple[Path, ...]:
    site = Path(environ.get(SITE_VARIABLE) or _SITE)
    home = environ.get("HOME") or os.sep
    user = Path(environ.get("XDG_CONFIG_HOME") or Path(home) / ".config") / "vitra" / "profiles"
    return site, user
