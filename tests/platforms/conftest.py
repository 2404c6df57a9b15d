"""The platforms that the suite is run on, and the crew that runs it.

Each test here is a `behaviour`, and is run once on each platform. Those of a module run side by
side: a pod takes two seconds, most of which nobody has a processor for.
"""

from __future__ import annotations

from collections.abc import Iterator
from logging import INFO, getLogger
from pathlib import Path

import pytest

from tests.cluster.fixtures import IMAGE, fresh_bucket, fresh_namespace, settings
from tests.conftest import private_home

from .crew import Crew
from .place import IN_A_DIRECTORY, ON_UVLOOP, Platform

# The fixture asks for the control plane where it is needed, which no name of a fixture tells.
ON_A_CLUSTER = [pytest.param(one, marks=pytest.mark.control_plane) for one in ("gke", "pathways")]


SELDOM = [pytest.mark.control_plane, pytest.mark.slow]
WITHOUT_A_BUCKET = [
    pytest.param(f"{one}{IN_A_DIRECTORY}", marks=SELDOM) for one in ("gke", "pathways")
]

ON_ANOTHER_LOOP = [
    pytest.param("local on uvloop", marks=pytest.mark.full),
    pytest.param("gke on uvloop", marks=SELDOM),
]


ALL = ["local", *ON_ANOTHER_LOOP, *ON_A_CLUSTER, *WITHOUT_A_BUCKET]


@pytest.fixture(scope="module", params=ALL)
def platform(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Where the jobs of the module run, with the variables by which a user chooses it."""
    title = request.param
    name = title.removesuffix(ON_UVLOOP).removesuffix(IN_A_DIRECTORY)
    with pytest.MonkeyPatch.context() as patch, private_home(patch) as home:
        folder = tmp_path_factory.mktemp(name)
        patch.setenv("KINETIC_BACKEND", name)
        patch.setenv("KINETIC_PACKAGE_ROOT", str(Path(__file__).parent))  # not the whole tree
        patch.chdir(Path(__file__).parent)
        patch.setenv("SWEEP_RATE", "$(HOME) 'and' more")
        patch.setenv("SWEEP_SECRET_TOKEN", "squeamish-ossifrage")
        patch.setenv("NOT_ASKED_FOR", "x")
        patch.setattr(getLogger("absl"), "level", INFO)
        if name == "local":
            patch.setenv("KINETIC_LOCAL_SLOTS", "16")
            yield Platform(title=title, home=home, folder=folder, side_by_side=4)
        else:
            yield from _cluster(request, patch, name, home, folder)


def _cluster(
    request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, name: str, home: Path, folder: Path
) -> Iterator[Platform]:
    plane, kubelet, server = map(request.getfixturevalue, ("control_plane", "nodes", "gcs_server"))
    if name == "pathways":
        request.getfixturevalue("groups")
    with fresh_namespace(plane, kubelet) as namespace:
        if name == "pathways":  # a JobSet, unlike the other kind, stays for its log
            patch.setenv("KINETIC_MULTIHOST", "jobset")
        for variable, value in settings(namespace, fresh_bucket(server), server).items():
            patch.setenv(variable, value)
        if request.param.endswith(IN_A_DIRECTORY):
            (folder / "store").mkdir()
            patch.setenv("KINETIC_STORE", str(folder / "store"))
        kubelet.set_environment(STORAGE_EMULATOR_HOST=server)
        options = {"container_image": IMAGE, "cpu": 0.1}
        yield Platform(
            title=request.param, home=home, folder=folder, side_by_side=8, options=options
        )
        kubelet.reset()


@pytest.fixture(autouse=True)
def home(platform: Platform) -> Path:
    """One for the module, instead of one for each test: they run side by side."""
    return platform.home


@pytest.fixture(scope="module")
def crew(platform: Platform, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Has begun with all behaviours of the module that were asked for."""
    with Crew(platform) as crew:
        for item in request.session.items:
            if item.parent is request.node and item.callspec.params["platform"] == platform.title:
                crew.begin(item)
        yield crew
