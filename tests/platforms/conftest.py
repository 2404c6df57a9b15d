"""The platforms that this suite runs on, and the crew that runs it.

Each test here is a `behaviour` and runs once on each platform. Those of a module run side by
side: a pod takes two seconds, most of them idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from logging import INFO, getLogger
from pathlib import Path

import pytest

from tests.cluster.fixtures import IMAGE, fresh_bucket, fresh_namespace, settings
from tests.conftest import private_home

from .crew import Crew
from .harness import IN_A_DIRECTORY, ON_UVLOOP, Platform

# `platform` requests the control plane at run time, so its parameters carry the marker.
ON_A_CLUSTER = [
    pytest.param(backend, marks=pytest.mark.control_plane) for backend in ("gke", "pathways")
]


RARELY_RUN = [pytest.mark.control_plane, pytest.mark.slow]
WITHOUT_A_BUCKET = [
    pytest.param(f"{backend}{IN_A_DIRECTORY}", marks=RARELY_RUN) for backend in ("gke", "pathways")
]

ON_ANOTHER_LOOP = [
    pytest.param("local on uvloop", marks=pytest.mark.full),
    pytest.param("gke on uvloop", marks=RARELY_RUN),
]

ALL = ["local", *ON_ANOTHER_LOOP, *ON_A_CLUSTER, *WITHOUT_A_BUCKET]


@pytest.fixture(scope="module", params=ALL)
def platform(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Platform]:
    """Provide the platform, chosen by environment variables as a user would choose it."""
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
        if name == "pathways":  # a JobSet, unlike the other kind, keeps its log after it ends
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
    """Return the module's home: its tests run side by side and share one."""
    return platform.home


@pytest.fixture(scope="module")
def crew(platform: Platform, request: pytest.FixtureRequest) -> Iterator[Crew]:
    """Provide a crew that has started all selected behaviours of the module."""
    with Crew(platform) as crew:
        for item in request.session.items:
            if item.parent is request.node and item.callspec.params["platform"] == platform.title:
                crew.begin(item)
        yield crew
