"""Test the sources of every setting (argument, variable, profile, default), and the backend."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from kinetic import accelerators, configuration, profiles
from kinetic.configuration import Target, home, log_level, profiles_file, resolve
from kinetic.errors import ConfigurationError, ProfileError
from kinetic.profiles import Profile, Profiles
from tests import programs

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    "backend",
    "project",
    "zone",
    "cluster",
    "namespace",
    "base_image_repo",
    "output_dir",
)
SETTINGS = (*ARGUMENTS, "store", "store_claim", "kube_context")
DEFAULTS = {
    "backend": "local",
    "zone": "us-central1-a",
    "cluster": "kinetic-cluster",
    "namespace": "default",
}


class Machine:
    """An environment with a private home."""

    def __init__(self, root: Path) -> None:
        self.environ = {"HOME": str(root)}

    def profile(self, **settings: str) -> None:
        work = Profile.checked("work", settings)
        profiles.save(profiles_file(self.environ), Profiles().create(work).use("work"))

    def resolve(self, **arguments: str) -> Target:
        return resolve(**arguments, environ=self.environ)  # type: ignore[arg-type]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def value_of(setting: str, letter: str) -> str:
    """Return a value of *setting* for the source with this first letter."""
    backend = {"a": "pathways", "v": "gke", "p": "local"}
    if setting == "backend":
        return backend[letter]
    return f"us-zone1-{letter}" if setting == "zone" else f"{setting}-{letter}"


@pytest.mark.parametrize("setting", SETTINGS)
def test_argument_variable_profile_default(machine: Machine, setting: str) -> None:
    """Earlier sources win. An empty variable counts as unset; an empty argument is an error."""

    def found(**arguments: str) -> str | None:
        return getattr(machine.resolve(**arguments), setting)

    variable = f"KINETIC_{setting.upper()}"
    assert found() == DEFAULTS.get(setting)
    machine.profile(**{setting: value_of(setting, "p")})
    machine.environ[variable] = ""
    assert found() == value_of(setting, "p")
    machine.profile(**{"project": "p", setting: value_of(setting, "p")})
    machine.environ[variable] = value_of(setting, "v")
    assert found() == value_of(setting, "v")
    if setting in ARGUMENTS:
        assert found(**{setting: value_of(setting, "a")}) == value_of(setting, "a")
        with pytest.raises(ConfigurationError, match=f"{setting} is empty"):
            found(**{setting: ""})


def test_the_user_of_pods_is_a_number_from_variable_or_profile(machine: Machine) -> None:
    assert machine.resolve().run_as_user is None
    machine.profile(run_as_user="1000")
    assert machine.resolve().run_as_user == 1000
    machine.environ["KINETIC_RUN_AS_USER"] = "0"
    assert machine.resolve().run_as_user == 0
    for invalid in ("me", "-1", "2147483648", "1.5"):
        machine.environ["KINETIC_RUN_AS_USER"] = invalid
        with pytest.raises(ConfigurationError, match="KINETIC_RUN_AS_USER"):
            machine.resolve()


def test_annotations_of_pods_are_checked_before_any_job(machine: Machine) -> None:
    assert machine.resolve().pod_annotations == ()
    machine.profile(pod_annotations="sidecar.istio.io/inject=false")
    assert machine.resolve().pod_annotations == (("sidecar.istio.io/inject", "false"),)
    machine.environ["KINETIC_POD_ANNOTATIONS"] = "a=, example.com/B_c=x=y"
    assert machine.resolve().pod_annotations == (("a", ""), ("example.com/B_c", "x=y"))
    for invalid in ("a", "=b", "a b=c", "a/b/c=d", "a=b,", "kinetic.dev/name=x"):
        machine.environ["KINETIC_POD_ANNOTATIONS"] = invalid
        with pytest.raises(ConfigurationError, match="KINETIC_POD_ANNOTATIONS"):
            machine.resolve()


SHARED = {"GOOGLE_CLOUD_PROJECT": "shared"}


@pytest.mark.parametrize(
    ("environ", "profile", "arguments", "found", "why"),
    [
        ({}, {}, {}, ("local", None), "^no project is configured$"),
        ({}, {}, {"project": "p"}, ("gke", "p"), "'p' comes from the argument project"),
        ({"KINETIC_PROJECT": "v"}, {}, {}, ("gke", "v"), "'v' comes from KINETIC_PROJECT"),
        ({}, {"project": "w"}, {}, ("gke", "w"), "'w' comes from the profile 'work'"),
        ({"KINETIC_KUBE_CONTEXT": "kind-kind"}, {}, {}, ("gke", None), ""),
        # Google's variable comes last. It selects gke only with a cluster.
        (SHARED, {}, {}, ("local", "shared"), "KINETIC_PROJECT"),
        (SHARED, {}, {"backend": "gke"}, ("gke", "shared"), ""),
        (SHARED, {"project": "ours"}, {"backend": "gke"}, ("gke", "ours"), ""),
        (SHARED, {}, {"cluster": "c"}, ("gke", "shared"), ""),
        (SHARED, {"cluster": "c"}, {}, ("gke", "shared"), ""),
        ({}, {}, {"cluster": "c"}, ("local", None), "'c'.*no project is configured"),
        # A named backend wins over a project.
        (
            {"KINETIC_PROJECT": "p"}, {}, {"backend": "local"},
            ("local", "p"), "^chosen by the argument backend$",
        ),
        (
            {"KINETIC_PROJECT": "p", "KINETIC_BACKEND": "LOCAL"}, {}, {},
            ("local", "p"), "^chosen by KINETIC_BACKEND$",
        ),
    ],
)  # fmt: skip
def test_the_settings_select_the_backend_and_explain_it(
    machine: Machine,
    environ: dict[str, str],
    profile: dict[str, str],
    arguments: dict[str, str],
    found: tuple[str, str | None],
    why: str,
) -> None:
    machine.environ |= environ
    if profile:
        machine.profile(**profile)
    target = machine.resolve(**arguments)
    assert (target.backend, target.project) == found
    assert re.search(why, target.why)


def test_google_cloud_project_selects_gke_for_a_missing_accelerator(machine: Machine) -> None:
    machine.environ |= {"GOOGLE_CLOUD_PROJECT": "shared", "CUDA_VISIBLE_DEVICES": "0,1"}

    def chosen(name: str) -> str:
        accelerator = accelerators.parse(name)
        return resolve(accelerator=accelerator, environ=machine.environ).backend

    assert [chosen(name) for name in ("cpu", "l4", "l4x2", "l4x4")] == ["local"] * 3 + ["gke"]
    assert (chosen("tpu-v5p-16"), machine.resolve().project) == ("pathways", "shared")
    target = resolve(accelerator=accelerators.parse("l4x4"), environ=machine.environ)
    assert "this machine has no gpu-l4x4" in target.why and "'shared'" in target.why
    machine.environ["KINETIC_BACKEND"] = "local"
    assert chosen("l4x4") == "local"
    del machine.environ["GOOGLE_CLOUD_PROJECT"], machine.environ["KINETIC_BACKEND"]
    assert chosen("l4x4") == "local", "no project is configured at all"


@pytest.mark.parametrize("arguments", [{"project": "p"}, {"project": "p", "backend": "gke"}])
def test_several_hosts_turn_gke_into_pathways(machine: Machine, arguments: dict[str, str]) -> None:
    several = accelerators.parse("tpu-v5p-16")
    target = resolve(**arguments, accelerator=several, environ=machine.environ)
    assert target.backend == "pathways"
    assert target.why.endswith("; tpu-v5p-16 has 4 hosts")


def test_other_accelerators_and_backends_do_not_become_pathways(machine: Machine) -> None:
    for name in ("cpu", "gpu-a100x8", "tpu-v5e-8", "tpu-v6e-8"):
        accelerator = accelerators.parse(name)
        assert (
            resolve(project="p", accelerator=accelerator, environ=machine.environ).backend == "gke"
        )
    several = accelerators.parse("tpu-v5p-16")
    for backend in ("local", "pathways"):
        target = resolve(backend=backend, project="p", accelerator=several, environ=machine.environ)
        assert target.backend == backend


@pytest.mark.parametrize("backend", ["gke", "pathways"])
def test_a_cluster_backend_needs_a_project_or_a_context(machine: Machine, backend: str) -> None:
    with pytest.raises(ConfigurationError, match=r"^No GCP project configured") as caught:
        machine.resolve(backend=backend)
    for name in ("KINETIC_PROJECT", "KINETIC_KUBE_CONTEXT"):
        assert name in str(caught.value)
    machine.environ["KINETIC_KUBE_CONTEXT"] = "c"
    assert machine.resolve(backend=backend).backend == backend


def test_an_unknown_backend_is_an_error_with_the_nearest_name(machine: Machine) -> None:
    with pytest.raises(ConfigurationError, match=r"'gek' \(from the argument backend\).*'gke'"):
        machine.resolve(backend="gek")
    machine.environ["KINETIC_BACKEND"] = "zzz"
    with pytest.raises(ConfigurationError, match=r"from KINETIC_BACKEND.*gke, pathways, local"):
        machine.resolve()


def test_a_profile_that_does_not_exist_is_an_error(machine: Machine) -> None:
    machine.profile(project="p")
    machine.environ["KINETIC_PROFILE"] = "wokr"
    with pytest.raises(ProfileError, match="did you mean 'work'"):
        machine.resolve()


def test_the_file_in_kinetic_profiles_file_must_exist(machine: Machine, tmp_path: Path) -> None:
    file = machine.environ["KINETIC_PROFILES_FILE"] = str(tmp_path / "team.json")
    with pytest.raises(ProfileError, match=rf"{file}; correct KINETIC_PROFILES_FILE or unset it"):
        machine.resolve()
    machine.profile(zone="us-east5-b")
    assert machine.resolve().zone == "us-east5-b"


@pytest.mark.parametrize(
    "zone", ["mars", "us-central", "us_central1_a", "US-CENTRAL1-A", "us-central1-"]
)
def test_the_error_about_an_invalid_zone_names_its_source(machine: Machine, zone: str) -> None:
    with pytest.raises(ConfigurationError, match=f"'{zone}'.*the argument zone"):
        machine.resolve(zone=zone)
    machine.environ["KINETIC_ZONE"] = zone
    with pytest.raises(ConfigurationError, match="KINETIC_ZONE"):
        machine.resolve()
    for valid in ("us-central1-a", "northamerica-northeast1-c", "us-south1-ai1b", "me-west1"):
        assert machine.resolve(zone=valid).zone == valid


def test_equality_of_targets_ignores_their_explanation(machine: Machine) -> None:
    by_argument = machine.resolve(backend="local")
    assert by_argument == machine.resolve()
    assert len({by_argument, machine.resolve()}) == 1
    assert by_argument != machine.resolve(namespace="other")


def test_a_store_of_the_user(machine: Machine) -> None:
    assert machine.resolve(store="gs://mine").store == "gs://mine"
    with pytest.raises(ConfigurationError, match="store is empty"):
        machine.resolve(store="")


def test_kinetic_home_overrides_the_default_home(tmp_path: Path) -> None:
    assert home({"HOME": "/home/me"}) == Path("/home/me/.kinetic")
    assert home({"HOME": "/home/me", "KINETIC_HOME": ""}) == Path("/home/me/.kinetic")
    assert home({"HOME": "/home/me", "KINETIC_HOME": "/var/k"}) == Path("/var/k")
    assert home({"HOME": "/home/me", "KINETIC_HOME": "~/k"}) == Path("/home/me/k")
    assert home({}) == Path.home() / ".kinetic"


@pytest.mark.parametrize("path", ["k", "./k", "~someone/k"])
def test_a_relative_home_is_an_error(path: str) -> None:
    with pytest.raises(ConfigurationError, match="KINETIC_HOME must be an absolute path"):
        home({"HOME": "/home/me", "KINETIC_HOME": path})


def test_a_home_that_is_not_utf_8_is_an_error() -> None:
    for environ in ({"KINETIC_HOME": "/tmp/h\udcff"}, {"HOME": "/home/\udcff"}):
        with pytest.raises(ConfigurationError, match=r"udcff.*UTF-8.*KINETIC_HOME"):
            home(environ)


def test_kinetic_profiles_file_overrides_the_default_file() -> None:
    assert profiles_file({"HOME": "/h"}) == Path("/h/.kinetic/profiles.json")
    assert profiles_file({"KINETIC_HOME": "/k"}) == Path("/k/profiles.json")
    both = {"KINETIC_HOME": "/k", "KINETIC_PROFILES_FILE": "/elsewhere.json"}
    assert profiles_file(both) == Path("/elsewhere.json")


def test_kinetic_log_level_sets_the_log_level() -> None:
    assert log_level({}) is None and log_level({"KINETIC_LOG_LEVEL": ""}) is None
    for name in ("debug", "INFO", "WARNING", "ERROR", "FATAL"):
        assert log_level({"KINETIC_LOG_LEVEL": name}) == getattr(logging, name.upper())
    with pytest.raises(ConfigurationError, match="did you mean 'WARNING'"):
        log_level({"KINETIC_LOG_LEVEL": "warnign"})


def test_every_setting_has_a_variable_that_is_documented() -> None:
    documented = configuration.VARIABLES
    assert {f"KINETIC_{setting.upper()}" for setting in SETTINGS} <= documented.keys()


def test_every_variable_in_the_source_is_documented() -> None:
    """Variables that kinetic passes to its own processes are exempt."""
    internal = {
        *("KINETIC_ORDER_FD", "KINETIC_LOCAL_PROCESS"),
        *("KINETIC_BOOTSTRAP", "KINETIC_RUNNER_PACKAGES"),
    }
    in_pods = {"ORDER", "DISRUPTIONS", "FAILURES", "POD_BEGAN", "POD_NAME", "POD_UID"}
    in_pods |= {
        "JAX",
        "KEY_FILE",
        "LWS",
        "POD_ACCOUNT_FOLDER",
        "TERMINATION_LOG",
    }
    in_pods |= {"CREW", "JOB_UID", "POD_CGROUP_FOLDER", "RANK", "ROUND"}
    internal |= {f"KINETIC_{name}" for name in in_pods}
    used = {
        name
        for package in ("kinetic", "runner")
        for path in (ROOT / package).rglob("*.py")
        for name in re.findall(r"[\"'](KINETIC_[A-Z_]*[A-Z])[\"']", path.read_text())
    }
    assert used - internal - configuration.VARIABLES.keys() == set()


def test_resolving_loads_nothing_but_the_standard_library() -> None:
    code = """
import sys
from kinetic import accelerators, configuration
configuration.resolve(accelerator=accelerators.parse("tpu-v5e-1"), environ={"HOME": "/nowhere"})
loaded = {name.partition(".")[0] for name in sys.modules}
print(sorted(loaded - set(sys.stdlib_module_names) - {"kinetic", "__main__"}))
print("difflib" in sys.modules)
"""
    setup = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
    assert programs.python("-I", "-S", "-c", setup + code).split("\n")[:2] == ["[]", "False"]


@pytest.mark.parametrize(
    ("name", "text", "requirement"),
    [
        ("KINETIC_LOCAL_SLOTS", "many", "a whole number of at least 1, not 'many'"),
        ("KINETIC_LOCAL_SLOTS", "0", "a whole number of at least 1, not '0'"),
        ("KINETIC_LOCAL_SLOTS", "1.5", "a whole number of at least 1, not '1.5'"),
        ("KINETIC_LOCAL_IDLE_S", "abc", "a number of at least 0, not 'abc'"),
        ("KINETIC_LOCAL_IDLE_S", "nan", "a number of at least 0, not 'nan'"),
        ("KINETIC_PAYLOAD_SIZE_WARN_MB", "x", "a number of at least 0, not 'x'"),
    ],
)
def test_the_error_about_an_invalid_number_says_what_is_required(
    name: str, text: str, requirement: str
) -> None:
    environ = {"HOME": "/nowhere", name: text}
    with pytest.raises(ConfigurationError, match=f"^{name} must be {requirement}$"):
        resolve(backend="local", environ=environ)
    for valid in ("3", ""):
        assert resolve(backend="local", environ={"HOME": "/nowhere", name: valid})
