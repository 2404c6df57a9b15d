"""A process that wants the image of a project: its folder and the servers are the arguments."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from kinetic import configuration
from kinetic.aio.gcs.store import GcsStore
from kinetic.aio.images.bundled import Pace
from kinetic.aio.images.container import ContainerImages
from kinetic.aio.images.recipe import wheel
from kinetic.aio.ports import ImageRequest

METADATA = "Metadata-Version: 2.4\nName: kinetic-aio\nVersion: 7.1\n\nSome words.\n"


async def main(project: Path, environ: dict[str, str]) -> None:
    images = ContainerImages(
        configuration.resolve(backend="gke", project="kn", cluster="c1", environ=environ),
        jobs=GcsStore("gs://kn-test", environ),
        builds=GcsStore("gs://kn-test", environ),
        environ=environ,
        pace=Pace(look_s=0.05),
        look=(0.01, 0.02),
        wheel=lambda: wheel({"kinetic/__init__.py": b"__version__ = '7.1'\n"}, METADATA),
    )
    request = ImageRequest(
        mode="bundled",
        category="cpu",
        base_image_repo="kinetic",
        python="3.12.4",
        entry_dir=project,
        root=project,
    )
    print((await images.resolve(request)).uri)
    await images.aclose()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
