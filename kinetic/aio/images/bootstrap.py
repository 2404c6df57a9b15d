"""Let a job run in an image without kinetic's runner: the runner travels as an object of the store.

The pod decides at its start whether its image has the runner, so this needs no access to the
image's registry. `kinetic._runner.pod.bootstrap` is what the pod executes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from kinetic._runner.protocol import directory_urls, gcs_names
from kinetic.aio.images import recipe
from kinetic.errors import ConfigurationError

COMMAND = ("python3", "-c", "import os; exec(os.environ.pop('KINETIC_BOOTSTRAP'))")
"""The command of a container; the path of the runner in its image follows."""

CONSTRAINTS = Path(__file__).with_name("runner-constraints.txt")
"""The versions of the packages that a pod installs; ``tox run -e pins`` writes them."""

OFFICIAL = re.compile(r"(?:[^/]+/)*library/[^/]+|[^/]+")
"""The official images of Docker Hub, or of a mirror: none of them contains kinetic's runner."""

_PYTHON = re.compile(r"(?:(?:[^/]+/)*library/)?python:(?P<version>3\.\d+)(?:[.-].*)?")
"""The official images of Python; their names contain the version."""

NOTICE = (
    "%s %s kinetic's runner. A job without it installs it first, from a package index, which takes "
    "about 10 s. `kinetic build-image --flavor plain` builds an image that has it"
)


def check_python(image: str, python: str) -> None:
    """Raise an error if *image* is an official one of another minor version than *python*.

    Raises:
        ConfigurationError: The image has another version.
    """
    minor = ".".join(python.split(".")[:2])
    if (named := _PYTHON.fullmatch(image)) is not None and named["version"] != minor:
        instead = f"{image[: named.start('version')]}{minor}-slim"
        raise ConfigurationError(
            f"{image} has Python {named['version']}, and this is Python {python}: functions "
            f"need the same minor version, so use container_image={instead!r}"
        )


@functools.cache
def runner_archive() -> tuple[str, bytes]:
    """Return the object name and the content of the archive with the runner. Reads the disk."""
    files = recipe.runner_files()
    content = recipe.stored_zip({name: files[name] for name in sorted(files)})
    return f"code/{hashlib.sha256(content).hexdigest()}.runner", content


@functools.cache
def variables(store_url: str, archive: str, python: str) -> Mapping[str, str]:
    """Return the variables that `COMMAND` needs. Reads the disk.

    *archive* is the runner's object in the store at *store_url*, and *python* the version of the
    submitter.
    """
    in_bucket = store_url.startswith(gcs_names.SCHEME)
    plan: dict[str, object] = {
        "python": python,
        "needs": [
            (requirement, module)
            for requirement, module in recipe.RUNNER_NEEDS.items()
            if in_bucket or module != "google.cloud.storage"
        ],
        "constraints": {
            line.partition("==")[0]: line for line in CONSTRAINTS.read_text().splitlines()
        },
        "digest": archive.partition("/")[2].partition(".")[0],
    }
    if in_bucket:
        location = gcs_names.BucketFolder.from_url(store_url)
        plan |= {"bucket": location.bucket, "object": location.object_name(archive)}
    else:
        plan["file"] = f"{directory_urls.directory_of(store_url)}/{archive}"
    source = (recipe.PACKAGE / "_runner" / "pod" / "bootstrap.py").read_text("utf-8")
    return {"KINETIC_BOOTSTRAP": f"{source}\n\nstart({json.dumps(plan)})\n"}
