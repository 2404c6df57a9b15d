"""Test profiles: strict reading, immutable changes, and atomic writes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kinetic.errors import ConfigurationError, ProfileError
from kinetic.profiles import SETTINGS, Profile, Profiles, load, save

ROOT = Path(__file__).parents[2]
WORK = Profile.checked("work", {"project": "p", "zone": "europe-west4-b"})
PLAY = Profile.checked("play", {"backend": "local"})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kinetic" / "profiles.json"


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))


def test_what_is_saved_is_loaded(path: Path) -> None:
    assert load(path) == Profiles()
    assert load(path).active({}) is None
    profiles = Profiles().create(WORK).create(PLAY).use("play")
    save(path, profiles)
    assert load(path) == profiles
    assert load(path).active({}) == PLAY
    assert os.listdir(path.parent) == ["profiles.json"]


def test_the_file_has_the_documented_form(path: Path) -> None:
    save(path, Profiles().create(WORK).use("work"))
    assert json.loads(path.read_text()) == {
        "current": "work",
        "profiles": {
            "work": {"project": "p", "zone": "europe-west4-b", "cluster": None, "namespace": None}
        },
    }


def test_null_and_empty_settings_count_as_unset(path: Path) -> None:
    write(path, {"profiles": {"work": {"project": None, "zone": "", "cluster": "c"}}})
    assert load(path)["work"].settings == {"cluster": "c"}


def test_unknown_keys_survive_a_change(path: Path) -> None:
    write(
        path,
        {"version": 7, "current": None, "profiles": {"work": {"project": "p", "colour": [1]}}},
    )
    save(path, load(path).use("work"))
    document = json.loads(path.read_text())
    assert document["version"] == 7
    assert document["profiles"]["work"]["colour"] == [1]
    assert document["current"] == "work"


@pytest.mark.parametrize("name", ["KINETIC_HOME", "KINETIC_PROFILES_FILE"])
def test_a_path_through_a_file_names_the_variable(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "profiles.json"
    with pytest.raises(ProfileError, match=f"{tmp_path}/file is no folder; correct {name}"):
        load(path, required=name == "KINETIC_PROFILES_FILE")


def test_a_missing_current_profile_counts_as_none_with_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, {"current": "wrok", "profiles": {"work": {}}})
    assert load(path).current is None
    assert load(path).current is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"{path}: \"current\" is 'wrok', which isn't a profile" in record.getMessage()
    assert "did you mean 'work'?" in record.getMessage()


def test_an_unknown_setting_is_kept_with_one_warning(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(path, {"profiles": {"work": {"zome": "z", "zone": "y"}}})
    save(path, load(path))
    assert load(path)["work"].settings == {"zone": "y"}
    assert json.loads(path.read_text())["profiles"]["work"]["zome"] == "z"
    (record,) = caplog.records
    assert "'work' has 'zome', which isn't a setting; did you mean 'zone'" in record.getMessage()


def test_the_variable_wins_over_the_current_profile() -> None:
    both = Profiles().create(WORK).create(PLAY).use("play")
    assert both.active({"KINETIC_PROFILE": "work"}) == WORK
    assert both.active({"KINETIC_PROFILE": ""}) == PLAY


def test_an_unknown_profile_is_an_error_with_the_nearest_name() -> None:
    both = Profiles().create(WORK).create(PLAY)
    with pytest.raises(ProfileError, match=r"--profile: .*'wrok'.*did you mean 'work'\?"):
        both.active({"KINETIC_PROFILE": "wrok"})
    with pytest.raises(ProfileError, match="there are work, play"):
        both.use("zzz")
    with pytest.raises(ProfileError, match="none exists yet"):
        Profiles().use("work")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ([], "the file must be an object"),
        ({"profiles": [1]}, '"profiles" must be an object'),
        ({"profiles": {"work": "p"}}, "the profile 'work' must be an object"),
        ({"profiles": {"work": {"zone": 5}}}, "\"zone\" of the profile 'work' must be text"),
        ({"profiles": {"a b": {}}}, "'a b' can't be the name"),
        ({"profiles": {}, "current": 5}, '"current" must be the name'),
    ],
)
def test_a_malformed_file_is_an_error_that_names_it(
    path: Path, content: object, complaint: str
) -> None:
    write(path, content)
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    assert isinstance(caught.value, ProfileError)
    assert str(path) in str(caught.value)
    assert complaint in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["current", "profiles", "work", *SETTINGS]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_any_json_is_profiles_or_a_profile_error(
    tmp_path_factory: pytest.TempPathFactory, content: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_text(json.dumps(content))
    try:
        profiles = load(path)
    except ProfileError:
        return
    save(path, profiles)
    assert repr(load(path)) == repr(profiles)  # not by value, because NaN never equals NaN


def test_a_file_that_cannot_be_read_is_an_error(path: Path) -> None:
    path.mkdir(parents=True)
    with pytest.raises(ProfileError, match="can't read"):
        load(path)


def test_the_file_and_its_directory_are_private(path: Path) -> None:
    before = os.umask(0)
    try:
        save(path, Profiles().create(WORK))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_failed_write_changes_nothing(path: Path) -> None:
    path.mkdir(parents=True)
    (path / "kept").touch()
    with pytest.raises(ProfileError, match="can't write"):
        save(path, Profiles().create(WORK))
    assert os.listdir(path.parent) == ["profiles.json"]
    assert (path / "kept").exists()


ALTERNATE = """
import sys
from pathlib import Path
from kinetic.profiles import load, save
path = Path(sys.argv[1])
both = load(path)
for turn in range(50):
    save(path, both.remove("play") if turn % 2 else both)
"""


def test_a_reader_never_sees_half_a_file(path: Path) -> None:
    """Another process alternates between two versions while this one reads."""
    both = Profiles().create(WORK).create(PLAY)
    save(path, both)
    versions = []
    with subprocess.Popen([sys.executable, "-c", ALTERNATE, path], cwd=ROOT) as writer:
        while writer.poll() is None:
            versions.append(load(path))
    assert writer.returncode == 0
    assert all(profiles in (both, both.remove("play")) for profiles in versions)
    assert load(path) == both.remove("play")


def test_a_link_stays_a_link(path: Path, tmp_path: Path) -> None:
    path.parent.mkdir()
    elsewhere = tmp_path / "dotfiles.json"
    path.symlink_to(elsewhere)
    save(path, Profiles().create(WORK))
    assert path.is_symlink()
    assert load(elsewhere) == load(path) == Profiles().create(WORK)


def test_an_existing_profile_is_replaced_only_on_request() -> None:
    profiles = Profiles().create(WORK)
    other = Profile.checked("work", {"project": "other"})
    with pytest.raises(ProfileError, match="'work' exists already"):
        profiles.create(other)
    assert profiles.create(other, replacing=True)["work"] == other
    assert profiles["work"] == WORK  # profiles are immutable


def test_unsetting_and_removing() -> None:
    both = Profiles().create(WORK).create(PLAY).use("work")
    assert both.unset().current is None
    assert both.remove("work") == Profiles().create(PLAY)
    assert both.remove("play").current == "work"
    with pytest.raises(ProfileError, match="did you mean 'play'"):
        both.remove("plya")


@pytest.mark.parametrize("name", ["", "-a", "_a", "a b", "a.b", "ä", "a\n", "x" * 65])
def test_names_that_profiles_may_not_have(name: str) -> None:
    with pytest.raises(ProfileError, match="can't be the name"):
        Profile.checked(name, {})
    for valid in ("a", "A-b_c", "9", "x" * 64):
        assert Profile.checked(valid, {}).name == valid


def test_a_profile_takes_only_settings_that_exist() -> None:
    with pytest.raises(ProfileError, match="did you mean 'cluster'"):
        Profile.checked("work", {"clutser": "c"})
    assert Profile.checked("work", {"zone": None, "cluster": ""}).settings == {}
