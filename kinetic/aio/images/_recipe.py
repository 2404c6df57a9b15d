"""What goes into an image, as files: the Dockerfile and its context. Pure.

An image is: Python of the client's minor version, the accelerator's JAX, what
the runner needs, kinetic itself, the project's dependencies (in a bundled
image), and the runner in ``/app``. All packages are resolved together, so that
a dependency that wants another JAX gets the one of the accelerator that fits.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from types import MappingProxyType

from kinetic.aio.images._wheel import Wheel

__all__ = [
    "CATEGORIES",
    "PYTHON_IMAGE",
    "RUNNER_NEEDS",
    "base_context",
    "bundled_context",
    "digest",
    "minor",
    "packed",
    "tag",
]

RUNNER_NEEDS = ("absl-py>=2.1", "cloudpickle>=3.1.1", "google-cloud-storage>=2.18")
"""All that the runner imports beside Python's own library."""

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {"cpu": "jax", "gpu": "jax[cuda12]", "tpu": "jax[tpu]"}
)
"""The kinds of images, and the JAX of each."""

_LIBTPU = "https://storage.googleapis.com/jax-releases/libtpu_releases.html"
PYTHON_IMAGE = "python:{python}-slim"
"""What images begin with: Debian with Python, of the minor version in place of ``{python}``."""

_SYSTEM = (
    "(command -v cc && command -v git) || (apt-get update"
    " && apt-get install -y --no-install-recommends build-essential git"
    " && rm -rf /var/lib/apt/lists/*)"
)
_UV = '(command -v uv) || python3 -m pip install --no-cache-dir "uv>=0.8"'
_GPU = (
    "ENV LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
    " PATH=$PATH:/usr/local/nvidia/bin"
)
"""GKE puts the driver there, and tells nobody: without this no package finds ``libcuda.so.1``."""

_SHORT = 12


def minor(python: str) -> str:
    """``3.12`` of ``3.12.4``: what pickles of code agree on."""
    return ".".join(python.split(".")[:2])


def base_context(
    category: str,
    python: str,
    wheel: Wheel,
    runner: Mapping[str, bytes],
    *,
    python_image: str = PYTHON_IMAGE,
) -> dict[str, bytes]:
    """The context of ``{repo}/base-{category}``, to which jobs add their dependencies."""
    return bundled_context(category, python, wheel, runner, "", python_image=python_image)


def bundled_context(
    category: str,
    python: str,
    wheel: Wheel,
    runner: Mapping[str, bytes],
    requirements: str,
    *,
    python_image: str = PYTHON_IMAGE,
) -> dict[str, bytes]:
    """Everything that decides the image, by its path in the context.

    *requirements* is a requirements file, filtered; *runner* has the runner's files by name.
    *python_image* is what it begins with, see `PYTHON_IMAGE`.
    """
    context = {f"app/{name}": body for name, body in sorted(runner.items())}
    context[f"install/{wheel.name}"] = wheel.content
    if requirements:
        context["install/requirements.txt"] = requirements.encode()
    start = python_image.replace("{python}", minor(python))
    text = _dockerfile(category, start, python, wheel, bool(requirements))
    context["Dockerfile"] = text.encode()
    return context


def _dockerfile(
    category: str, start: str, python: str, wheel: Wheel, has_requirements: bool
) -> str:
    packages = [CATEGORIES[category], "keras", *RUNNER_NEEDS]
    install = " ".join(
        [
            "uv pip install --system --no-cache --compile-bytecode",
            *(f"--find-links {_LIBTPU}" for _ in [None] if category == "tpu"),
            *(json.dumps(one) for one in packages),
            f"/tmp/install/{wheel.name}",
            *("-r /tmp/install/requirements.txt" for _ in [None] if has_requirements),
        ]
    )
    return "\n".join(
        [
            f"FROM {start}",
            f"RUN {_SYSTEM}",
            f"RUN {_UV}",
            "COPY install/ /tmp/install/",
            f"RUN {install} && rm -rf /tmp/install",
            "WORKDIR /app",
            "COPY app/ /app/",
            "ENV KERAS_BACKEND=jax PYTHONUNBUFFERED=1",
            *([_GPU] if category == "gpu" else []),
            f"LABEL dev.kinetic.category={category} dev.kinetic.python={minor(python)}",
            'CMD ["python3"]',
            "",
        ]
    )


def digest(context: Mapping[str, bytes]) -> str:
    """SHA-256 over the names and contents of a context."""
    total = hashlib.sha256()
    for name in sorted(context):
        body = context[name]
        total.update(f"{len(name.encode())}:{name}:{len(body)}:".encode())
        total.update(body)
    return total.hexdigest()


def tag(category: str, context: Mapping[str, bytes]) -> str:
    """The image's tag: another one if and only if something in it is another."""
    return f"{category}-{digest(context)[:_SHORT]}"


def packed(context: Mapping[str, bytes]) -> bytes:
    """The context as the ``tar.gz`` that a build takes."""
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=buffer, mode="wb", filename="", mtime=0) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w") as archive,
    ):
        for name in sorted(context):
            entry = tarfile.TarInfo(name)
            entry.size = len(context[name])
            archive.addfile(entry, io.BytesIO(context[name]))
    return buffer.getvalue()
