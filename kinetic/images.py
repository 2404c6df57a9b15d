"""What goes into container images: ``python -m kinetic.images runner``, or ``... base tpu FOLDER``.

``runner`` prints the one file that an image of your own needs, at
``/app/remote_runner.py``. ``base`` writes the folder that a base image is built
from, for ``container_image="prebuilt"``.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kinetic.aio.backends.image_plans import Plan, base_image, image_of, publish

__all__ = ["Plan", "base_image", "image_of", "main", "publish", "runner", "write_base"]


def runner() -> str:
    """The runner of this kinetic, as the text of one file.

    It needs Python, of the minor version that submits, and what
    ``pip install cloudpickle google-cloud-storage absl-py`` gives.
    """
    from kinetic._version import __version__
    from kinetic.aio.images.recipe import runner_files, single_file

    return single_file(runner_files(), __version__)


def write_base(
    category: str,
    folder: str | Path,
    *,
    python: str | None = None,
    python_image: str | None = None,
) -> None:
    """Write what `base_image` is built from into *folder*, to be built by other means.

    Raises:
        ConfigurationError: There is no such category.
        OSError: The folder cannot be written.
    """
    plan = base_image(category, "base", python=python, python_image=python_image)
    for name, body in plan.context.items():
        file = Path(folder, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(body)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kinetic.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("runner", help="print the runner, for an image of your own")
    base = commands.add_parser("base", help="write what a base image is built from")
    base.add_argument("category", choices=("cpu", "gpu", "tpu"))
    base.add_argument("folder")
    base.add_argument("--python", help="the Python of the image (default: this one's)")
    base.add_argument("--from", dest="start", help="what to begin with (python:{python}-slim)")
    parsed = parser.parse_args(arguments)
    if parsed.command == "runner":
        sys.stdout.write(runner())
    else:
        write_base(parsed.category, parsed.folder, python=parsed.python, python_image=parsed.start)


if __name__ == "__main__":
    main()
