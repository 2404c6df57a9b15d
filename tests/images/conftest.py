"""Stand-ins for a project's bucket, builder, and registry, and clients that build on them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kinetic import configuration
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.images.container import ContainerImages
from kinetic.aio.images.recipe import Wheel, wheel
from kinetic.aio.ports import ImageRequest
from kinetic.testing import MemoryStore
from tests.gcs.server import GcsServer
from tests.images.packages import index
from tests.images.services import BuildServer, RegistryServer

__all__ = ["index"]

ABOUT = {"METADATA": "Metadata-Version: 2.4\nName: kinetic-aio\nVersion: 7.1\n\nSome words.\n"}
OWN = wheel({"kinetic/__init__.py": b"__version__ = '7.1'\n"}, "7.1", ABOUT)


def small_wheel() -> Wheel:
    """Return a tiny wheel in place of kinetic's, so that packing takes no time."""
    return OWN


@dataclass
class Cloud:
    """The three servers, and the clients that tests open."""

    bucket: GcsServer
    registry: RegistryServer
    builds: BuildServer
    jobs: MemoryStore = field(default_factory=MemoryStore)
    opened: list[ContainerImages] = field(default_factory=list)

    @property
    def environ(self) -> dict[str, str]:
        """Return the variables that make a client use these servers."""
        return {
            "STORAGE_EMULATOR_HOST": self.bucket.url,
            "CLOUD_BUILD_EMULATOR_HOST": self.builds.host,
            "ARTIFACT_REGISTRY_EMULATOR_HOST": self.registry.host,
        }

    def images(
        self,
        own: Callable[[], Wheel] = small_wheel,
        patience: float = 60.0,
        **environ: str,
    ) -> ContainerImages:
        """Open a client that shares nothing with others, like one of another process."""
        environ = self.environ | environ
        client = ContainerImages(
            configuration.resolve(backend="gke", project="kn", cluster="c1"),
            jobs=self.jobs,
            builds=GcsStore("gs://kn-test", environ),
            environ=environ,
            poll_s=(0.01, 0.02),
            retry_s=patience,
            wheel=own,
        )
        self.opened.append(client)
        return client


@pytest.fixture
async def cloud() -> AsyncIterator[Cloud]:
    async with GcsServer() as bucket, RegistryServer() as registry:
        async with BuildServer(bucket, registry) as builds:
            cloud = Cloud(bucket, registry, builds)
            try:
                yield cloud
            finally:
                for images in cloud.opened:
                    await images.aclose()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with dependencies."""
    (tmp_path / "requirements.txt").write_text("numpy==2.0\n")
    return tmp_path


@pytest.fixture
def request_of(project: Path) -> Callable[..., ImageRequest]:
    """Return a function that makes a request for an image of the project, with changed fields."""

    def make(**changes: object) -> ImageRequest:
        fields = {
            "mode": "bundled",
            "category": "cpu",
            "base_image_repo": "kinetic",
            "python": "3.12.4",
            "entry_dir": project,
            "root": project,
        }
        return ImageRequest(**(fields | changes))  # type: ignore[arg-type]

    return make
