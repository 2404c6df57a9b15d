"""Named sets of settings in ``profiles.json``, one of which is in use.

The file, private to the user::

    {"current": "work", "profiles": {"work": {"project": "p", "zone": "us-central1-a",
                                              "cluster": "c", "namespace": "default"}}}

Each setting may be absent, null or empty, which all mean that the profile does
not say. Keys that this version does not know are kept when the file is written;
a warning names those of a profile.

Reading and changing are apart: `load` and `save` touch the disk, the methods of
`Profiles` return another value.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from kinetic._messages import suggest
from kinetic._replacing import replacing
from kinetic._runner.protocol.private import make_folder
from kinetic.errors import ProfileError

__all__ = ["SETTINGS", "Profile", "Profiles", "load", "save", "update"]

SETTINGS = (
    "project",
    "zone",
    "cluster",
    "namespace",
    "backend",
    "store",
    "kube_context",
    "base_image_repo",
    "output_dir",
    "run_as_user",
)
"""The settings that a profile may have; kinetic writes the first four into every profile."""

ALWAYS_WRITTEN = 4
NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile; ``settings`` has what it says, and nothing else.

    ``extra`` is what the file says beside `SETTINGS`.
    """

    name: str
    settings: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @staticmethod
    def checked(name: str, settings: Mapping[str, str | None]) -> Profile:
        """Return a new profile of that name; empty settings are left out.

        Raises:
            ProfileError: The name cannot be one, or there is no such setting.
        """
        _check_name(name)
        for setting in settings:
            if setting not in SETTINGS:
                hint = suggest(setting, SETTINGS, otherwise=f"there are {', '.join(SETTINGS)}")
                raise ProfileError(f"a profile has no setting {setting!r}; {hint}")
        return Profile(name=name, settings={key: one for key, one in settings.items() if one})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """All profiles, and the name of the one in use; ``current`` is always one of them."""

    current: str | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __getitem__(self, name: str) -> Profile:
        """Return the profile of that name.

        Raises:
            ProfileError: There is none; the message has the nearest names.
        """
        if name not in self.profiles:
            names = ", ".join(self.profiles)
            otherwise = f"there are {names}" if names else "there is none yet"
            raise ProfileError(
                f"there is no profile {name!r}; {suggest(name, self.profiles, otherwise=otherwise)}"
            )
        return self.profiles[name]

    def active(self, environ: Mapping[str, str]) -> Profile | None:
        """Return the profile in use: KINETIC_PROFILE's, else the current one, else None.

        Raises:
            ProfileError: KINETIC_PROFILE names a profile that does not exist.
        """
        name = environ.get("KINETIC_PROFILE") or self.current
        try:
            return self[name] if name else None
        except ProfileError as error:
            raise ProfileError(f"KINETIC_PROFILE, or --profile: {error}") from None

    def create(self, profile: Profile, *, replacing: bool = False) -> Profiles:
        """Return these and *profile*.

        Raises:
            ProfileError: There is one of that name, and it is not to be replaced.
        """
        if profile.name in self.profiles and not replacing:
            raise ProfileError(f"the profile {profile.name!r} exists already; replace or remove it")
        return replace(self, profiles={**self.profiles, profile.name: profile})

    def use(self, name: str) -> Profiles:
        """Return these with the profile *name* in use.

        Raises:
            ProfileError: There is no such profile.
        """
        return replace(self, current=self[name].name)

    def unset(self) -> Profiles:
        """Return these with none in use."""
        return replace(self, current=None)

    def remove(self, name: str) -> Profiles:
        """Return these without the profile *name*, which is no longer in use then.

        Raises:
            ProfileError: There is no such profile.
        """
        removed = self[name]
        rest = {key: one for key, one in self.profiles.items() if one is not removed}
        current = None if self.current == name else self.current
        return replace(self, current=current, profiles=rest)


def load(path: Path, *, required: bool = False) -> Profiles:
    """Read the profiles; there are none where there is no file, unless it is *required*.

    A ``current`` that names no profile counts as none. Of that, and of unknown
    settings, a warning is logged once a process.

    Raises:
        ProfileError: The file cannot be read, or is not a file of profiles.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if required:
            raise ProfileError(
                f"there is no file of profiles {path}; correct KINETIC_PROFILES_FILE or unset it"
            ) from error
        return Profiles()
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or a NUL in the path
        raise ProfileError(f"the profiles in {path} cannot be read: {error}") from error
    try:
        # RecursionError: brackets nested some thousand times.
        content: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, f"it is not JSON ({error})") from error
    return _profiles(content, path)


def _profiles(content: object, path: Path) -> Profiles:
    document = _mapping(content, path, "the file")
    entries = _mapping(document.get("profiles") or {}, path, '"profiles"')
    profiles = {name: _profile(name, entry, path) for name, entry in entries.items()}
    current = document.get("current")
    if current is not None and not isinstance(current, str):
        raise _malformed(path, '"current" must be the name of a profile, or null')
    if current and current not in profiles:
        names = ", ".join(profiles)
        hint = suggest(
            current, profiles, otherwise=f"there are {names}" if names else "it has none"
        )
        _warn(f'{path}: "current" is {current!r}, which is no profile, so none is in use; {hint}')
    return Profiles(
        current=current if current in profiles else None,
        profiles=profiles,
        extra={key: one for key, one in document.items() if key not in ("current", "profiles")},
    )


def _profile(name: str, entry: object, path: Path) -> Profile:
    if NAME.fullmatch(name) is None:
        raise _malformed(path, f"{name!r} cannot be the name of a profile")
    said = _mapping(entry, path, f"the profile {name!r}")
    settings: dict[str, str] = {}
    for setting in SETTINGS:
        value = said.get(setting)
        if isinstance(value, str) and value:
            settings[setting] = value
        elif value not in (None, ""):
            raise _malformed(path, f'"{setting}" of the profile {name!r} must be text')
    extra = {key: one for key, one in said.items() if key not in SETTINGS}
    for key in extra:
        hint = suggest(key, SETTINGS, otherwise=f"there are {', '.join(SETTINGS)}")
        _warn(f"{path}: the profile {name!r} has {key!r}, which is no setting; {hint}")
    return Profile(name=name, settings=settings, extra=extra)


@functools.lru_cache
def _warn(message: str) -> None:
    """Log it, once: the file is read for each submission."""
    from absl import logging  # what is right costs no import

    logging.warning("%s", message)


def _mapping(value: object, path: Path, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed(path, f"{what} must be an object")
    return cast("dict[str, Any]", value)  # the keys of a JSON object are text


def _malformed(path: Path, what: str) -> ProfileError:
    return ProfileError(f"{path} is not a file of profiles: {what}; correct or delete it")


def _check_name(name: str) -> None:
    if NAME.fullmatch(name) is None:
        raise ProfileError(
            f"{name!r} cannot be the name of a profile: use at most 64 letters, digits, "
            "'-' and '_', a letter or digit first"
        )


def save(path: Path, profiles: Profiles) -> None:
    """Write the profiles, so that a reader finds the old file or the new one.

    Two writers at once do not damage the file; the later one wins. A link stays
    a link, to a new file.

    Raises:
        ProfileError: The file cannot be written; the old one is as it was.
    """
    document = {
        "current": profiles.current,
        "profiles": {name: _document(one) for name, one in profiles.profiles.items()},
        **profiles.extra,
    }
    content = json.dumps(document, indent=2) + "\n"
    try:
        target = path.resolve()
        make_folder(target.parent)
        with (
            replacing(target) as beside,
            open(beside, "x", encoding="utf-8", opener=_private) as file,
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ProfileError(f"the profiles cannot be written to {path}: {error}") from error


def update(path: Path, change: Callable[[Profiles], Profiles]) -> Profiles:
    """Read the profiles, *change* them and write them, one process at a time; what they are now.

    Raises:
        ProfileError: As `load`, `save` and *change*; the file is as it was.
    """
    try:
        target = path.resolve()
        make_folder(target.parent)
        with open(target.with_name(f".{target.name}.lock"), "ab", opener=_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            changed = change(load(path))
            save(path, changed)
            return changed
    except OSError as error:
        raise ProfileError(f"the profiles in {path} cannot be changed: {error}") from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _document(profile: Profile) -> dict[str, Any]:
    always = {setting: profile.settings.get(setting) for setting in SETTINGS[:ALWAYS_WRITTEN]}
    return {**always, **profile.settings, **profile.extra}
