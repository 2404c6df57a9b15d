"""Write files for images that you build: ``python -m kinetic.images``.

``runner FOLDER`` writes the runner. Copy it to ``/app`` of your image.
``base tpu FOLDER`` writes the build context of a base image for ``container_image="prebuilt"``.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from kinetic.aio.backends.image_plans import Plan, base_image, image_of, publish

__all__ = ["Plan", "base_image", "image_of", "main", "publish", "write_base", "write_runner"]


def write_runner(folder: str | Path) -> None:
    """Write the runner of this kinetic into *folder*, for ``/app`` of your own image.

    The runner needs the same minor version of Python as the process that submits, and
    ``pip install cloudpickle google-cloud-storage absl-py``. In an image without it, each job
    installs it when it starts.

    Args:
        folder: Created if it doesn't exist. ``remote_runner.py`` in it is the entry.

    Raises:
        OSError: The folder can't be written.

    Example::

        kinetic.images.write_runner("app")  # COPY app/ /app/
    """
    from kinetic.aio.images.recipe import runner_files

    _write(runner_files(), folder)


def write_base(
    category: str,
    folder: str | Path,
    *,
    flavor: str | None = None,
    python: str | None = None,
    python_image: str | None = None,
) -> None:
    """Write the build context of `base_image` to *folder*, to build it without Cloud Build.

    Args:
        category: ``cpu``, ``gpu``, or ``tpu``.
        folder: Created if it doesn't exist.
        flavor: ``jax`` (default), or ``plain`` for an image without JAX and Keras.
        python: A version such as ``3.12``. Default: this Python's.
        python_image: As for `base_image`.

    Raises:
        ConfigurationError: The category or flavor doesn't exist.
        OSError: The folder can't be written.

    Example::

        kinetic.images.write_base("tpu", "base-tpu")  # docker build base-tpu
    """
    plan = base_image(category, "base", flavor=flavor, python=python, python_image=python_image)
    _write(plan.context, folder)


def _write(files: Mapping[str, bytes], folder: str | Path) -> None:
    for name, content in files.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m kinetic.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("runner", help="write the runner, for your own image")
    runner.add_argument("folder")
    base = commands.add_parser("base", help="write the build context of a base image")
    base.add_argument("category", choices=("cpu", "gpu", "tpu"))
    base.add_argument("folder")
    base.add_argument("--flavor", choices=("jax", "plain"), help="plain: without JAX and Keras")
    base.add_argument("--python", help="the Python of the image (default: this one's)")
    base.add_argument("--from", dest="start", help="the image to start from (python:{python}-slim)")
    parsed = parser.parse_args(arguments)
    if parsed.command == "runner":
        write_runner(parsed.folder)
    else:
        write_base(
            parsed.category,
            parsed.folder,
            flavor=parsed.flavor,
            python=parsed.python,
            python_image=parsed.start,
        )


if __name__ == "__main__":
    main()
