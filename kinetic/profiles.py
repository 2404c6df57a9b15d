"""Named sets of settings in ``profiles.json``, one of which is in use.

The file, private to the user::

    {"current": "work", "profiles": {"work": {"project": "p", "zone": "us-central1-a",
                                              "cluster": "c", "namespace": "default"}}}

A setting that is absent, null, or empty has no value. Writing the file keeps keys that this version
doesn't know. A warning names the unknown keys inside a profile.

`load`, `save`, and `update` read or write the file; the methods of `Profiles` return a new value.
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
    "store_claim",
    "kube_context",
    "base_image_repo",
    "output_dir",
    "run_as_user",
    "pod_annotations",
    "ship",
)
"""The settings of a profile; kinetic writes the first four into every profile."""

ALWAYS_WRITTEN = SETTINGS[:4]
"""The settings that the file has for each profile; null if the profile has no value for one."""

NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One profile: ``settings`` has its values, ``extra`` the unknown keys of the file."""

    name: str
    settings: Mapping[str, str]
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    @staticmethod
    def checked(name: str, settings: Mapping[str, str | None]) -> Profile:
        """Return a new profile of that name; empty settings are left out.

        Raises:
            ProfileError: The name is invalid, or there is no such setting.
        """
        if NAME.fullmatch(name) is None:
            raise ProfileError(
                f"{name!r} can't be the name of a profile: use at most 64 letters, digits, "
                "'-' and '_', a letter or digit first"
            )
        for setting in settings:
            if setting not in SETTINGS:
                hint = suggest(setting, SETTINGS)
                raise ProfileError(f"a profile has no setting {setting!r}; {hint}")
        return Profile(name=name, settings={key: value for key, value in settings.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """All profiles, and the name of the one in use; ``current`` is always one of them."""

    current: str | None = None
    profiles: Mapping[str, Profile] = field(default_factory=dict[str, Profile])
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __getitem__(self, name: str) -> Profile:
        """Return the profile of that name.

        Raises:
            ProfileError: There is no such profile; the message has the nearest names.
        """
        if name not in self.profiles:
            raise ProfileError(f"there is no profile {name!r}; {suggest(name, self.profiles)}")
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
        """Return a copy of these profiles with *profile* added.

        Raises:
            ProfileError: A profile of that name exists, and *replacing* is false.
        """
        if profile.name in self.profiles and not replacing:
            raise ProfileError(f"the profile {profile.name!r} exists already; replace or remove it")
        return replace(self, profiles={**self.profiles, profile.name: profile})

    def use(self, name: str) -> Profiles:
        """Return a copy of these profiles in which *name* is in use.

        Raises:
            ProfileError: There is no such profile.
        """
        return replace(self, current=self[name].name)

    def unset(self) -> Profiles:
        """Return a copy of these profiles in which none is in use."""
        return replace(self, current=None)

    def remove(self, name: str) -> Profiles:
        """Return a copy of these profiles without *name*; if *name* was in use, none is.

        Raises:
            ProfileError: There is no such profile.
        """
        removed = self[name]
        rest = {key: profile for key, profile in self.profiles.items() if profile is not removed}
        current = None if self.current == name else self.current
        return replace(self, current=current, profiles=rest)


def load(path: Path, *, required: bool = False) -> Profiles:
    """Read the profiles. A missing file means that there are none, or an error if *required*.

    Warns once per process if ``current`` names no profile, and about unknown settings.

    Raises:
        ProfileError: The file can't be read, or isn't a file of profiles.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        if required:
            raise ProfileError(
                f"there is no file of profiles {path}; correct KINETIC_PROFILES_FILE or unset it"
            ) from error
        return Profiles()
    except NotADirectoryError as error:
        variable = "KINETIC_PROFILES_FILE" if required else "KINETIC_HOME"
        raise ProfileError(
            f"can't read the profiles in {path}: {path.parent} is no folder; correct {variable}"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the path
        raise ProfileError(f"can't read the profiles in {path}: {error}") from error
    try:
        content: object = json.loads(text)
    except ValueError as error:
        raise _malformed_error(path, f"it is not JSON ({error})") from error
    return _parse_profiles(content, path)


def _parse_profiles(content: object, path: Path) -> Profiles:
    """Return the profiles in the JSON of the file; warn if ``current`` names none of them."""
    document = _require_object(content, path, "the file")
    entries = _require_object(document.get("profiles") or {}, path, '"profiles"')
    profiles = {name: _parse_profile(name, entry, path) for name, entry in entries.items()}
    current = document.get("current")
    if current is not None and not isinstance(current, str):
        raise _malformed_error(path, '"current" must be the name of a profile, or null')
    if current and current not in profiles:
        hint = suggest(current, profiles)
        _warn_once(
            f'{path}: "current" is {current!r}, which isn\'t a profile, so none is in use; {hint}'
        )
    return Profiles(
        current=current if current in profiles else None,
        profiles=profiles,
        extra={key: value for key, value in document.items() if key not in ("current", "profiles")},
    )


def _parse_profile(name: str, entry: object, path: Path) -> Profile:
    """Return one profile of the file; warn about keys that aren't settings."""
    if NAME.fullmatch(name) is None:
        raise _malformed_error(path, f"{name!r} can't be the name of a profile")
    entries = _require_object(entry, path, f"the profile {name!r}")
    settings: dict[str, str] = {}
    for setting in SETTINGS:
        value = entries.get(setting)
        if isinstance(value, str) and value:
            settings[setting] = value
        elif value not in (None, ""):
            raise _malformed_error(path, f'"{setting}" of the profile {name!r} must be text')
    extra = {key: value for key, value in entries.items() if key not in SETTINGS}
    for key in extra:
        hint = suggest(key, SETTINGS)
        _warn_once(f"{path}: the profile {name!r} has {key!r}, which isn't a setting; {hint}")
    return Profile(name=name, settings=settings, extra=extra)


@functools.lru_cache
def _warn_once(message: str) -> None:
    """Log *message* once per process, although each submission reads the file."""
    from absl import logging  # not needed for a correct file

    logging.warning("%s", message)


def _require_object(value: object, path: Path, subject: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _malformed_error(path, f"{subject} must be an object")
    return cast("dict[str, Any]", value)  # the keys of a JSON object are text


def _malformed_error(path: Path, problem: str) -> ProfileError:
    return ProfileError(f"{path} isn't a file of profiles: {problem}; correct or delete it")


def save(path: Path, profiles: Profiles) -> None:
    """Replace the file of profiles atomically; of two writers, the later wins.

    If *path* is a symbolic link, the link stays, and its target is replaced.

    Raises:
        ProfileError: The file can't be written; the old file stays.
    """
    document = {
        "current": profiles.current,
        "profiles": {
            name: {**dict.fromkeys(ALWAYS_WRITTEN), **profile.settings, **profile.extra}
            for name, profile in profiles.profiles.items()
        },
        **profiles.extra,
    }
    content = json.dumps(document, indent=2) + "\n"
    try:
        target = path.resolve()
        make_folder(target.parent)
        with (
            replacing(target) as temporary,
            open(temporary, "x", encoding="utf-8", opener=_open_private) as file,
        ):
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ProfileError(f"can't write the profiles to {path}: {error}") from error


def update(path: Path, change: Callable[[Profiles], Profiles]) -> Profiles:
    """Read, *change*, and write the profiles, one process at a time; return the new profiles.

    Raises:
        ProfileError: `load`, `save`, or *change* failed, or another file operation; the file of
            profiles stays as it was.
    """
    try:
        target = path.resolve()
        make_folder(target.parent)
        with open(target.with_name(f".{target.name}.lock"), "ab", opener=_open_private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            changed = change(load(path))
            save(path, changed)
            return changed
    except OSError as error:
        raise ProfileError(f"can't change the profiles in {path}: {error}") from error


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
