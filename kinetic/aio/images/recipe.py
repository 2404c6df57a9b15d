"""Make the context of an image: the Dockerfile, and the files that it copies into the image.

An image has Python of the client's minor version, JAX for the accelerator, the runner's libraries,
kinetic itself, and the runner in ``/app``. A bundled image also has the project's dependencies. The
installer resolves all packages together, so a dependency that needs another
version of JAX fails the build.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kinetic.aio.images.dependencies import FILES, Dependencies
from kinetic.aio.ports import ImageRequest
from kinetic.errors import ConfigurationError

DISTRIBUTION = "kinetic-aio"
PACKAGE = Path(__file__).parents[2]
"""The folder of the package kinetic; in a git clone, ``_runner`` in it is a symbolic link."""

RUNNER_NEEDS: Mapping[str, str] = {
    "absl-py>=2.1": "absl",
    "cloudpickle>=3.1.1": "cloudpickle",
    "google-cloud-storage>=2.18": "google.cloud.storage",
}
"""The runner's libraries, and a module of each."""

CATEGORIES: Mapping[str, str] = {"cpu": "jax", "gpu": "jax[cuda12]", "tpu": "jax[tpu]"}
"""The categories of images, and the requirement that installs JAX in each."""

JAX_FLAVOR, PLAIN = "jax", "plain"
"""The flavors of base images: `PLAIN` has neither JAX nor Keras.

Its images are in the folder of this name, so a repository's name tells the flavor.
"""

JAX = "0.10.2"
"""The version of JAX in every image: the newest that supports all Pythons of this release."""

PYTHON_IMAGE = "python:{python}-slim"
"""The image to start from, Debian with Python; ``{python}`` becomes the minor version."""

USER = 10001
"""The user ID of jobs in the images that kinetic builds.

The user is a number, because Kubernetes can't tell whether a name means root.
"""

_LIBTPU = "https://storage.googleapis.com/jax-releases/libtpu_releases.html"
_SYSTEM = (
    "(command -v cc && command -v git) || (apt-get update"
    " && apt-get install -y --no-install-recommends build-essential git"
    " && rm -rf /var/lib/apt/lists/*)"
)
_UV = '(command -v uv) || python3 -m pip install --no-cache-dir "uv>=0.8"'
_ACCOUNT = f"getent passwd {USER} || useradd --create-home --uid {USER} kinetic"
_CHOWN = (
    f'find "$(python3 -c \'import sysconfig; print(sysconfig.get_path("data"))\')"'
    f" -xdev -type d -exec chown {USER} {{}} +"
)
"""This command lets `USER` write to Python's folders, because a job on a base image installs its
dependencies there. Without this command, only root can write there."""

_GPU = (
    "ENV LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/nvidia/lib64"
    " PATH=$PATH:/usr/local/nvidia/bin"
)
"""GKE mounts the GPU driver in the folders that these variables name. Without the variables, no
package finds ``libcuda.so.1``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """An image before it is built.

    ``image`` is its name, without a registry if no project is configured. ``context`` has
    everything that the image is built from, by path, including ``Dockerfile``; it is empty for
    your own image. ``requirements`` lists the packages that the image installs or, with a base
    image, the job. ``source`` is the file that they come from.
    """

    image: str
    category: str
    context: Mapping[str, bytes] = field(default_factory=dict[str, bytes], repr=False)
    requirements: str = ""
    source: Path | None = None

    @property
    def dockerfile(self) -> str:
        """The image's Dockerfile; empty for your own image."""
        return self.context.get("Dockerfile", b"").decode()

    @property
    def digest(self) -> str:
        """SHA-256 of ``context``, empty for your own image; a bundled image's tag has its start."""
        return digest(self.context) if self.context else ""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel, and the file name that installers need."""

    name: str
    content: bytes


def bundled_plan(
    request: ImageRequest,
    dependencies: Dependencies,
    repository: str,
    *,
    wheel: Wheel | None = None,
    python_image: str = PYTHON_IMAGE,
) -> Plan:
    """Plan the image of *request* with *dependencies*.

    The image's name is *repository* with a tag made from the image's content: the tag changes if
    and only if the content changes. If *repository* is empty, the name is only the tag.
    """
    context = image_context(
        request.category, request.python, dependencies, wheel=wheel, python_image=python_image
    )
    tag = f"{request.category}-{digest(context)[:12]}"
    return Plan(
        image=f"{repository}:{tag}" if repository else tag,
        category=request.category,
        context=context,
        requirements=dependencies.text,
        source=dependencies.source,
    )


def flavor_of(repository: str) -> str:
    """Return the flavor of the base images in *repository*."""
    return PLAIN if f"/{repository.rstrip('/')}".endswith(f"/{PLAIN}") else JAX_FLAVOR


def image_context(
    category: str,
    python: str,
    dependencies: Dependencies | None = None,
    *,
    wheel: Wheel | None = None,
    python_image: str = PYTHON_IMAGE,
    flavor: str = JAX_FLAVOR,
) -> dict[str, bytes]:
    """Return everything that an image is built from, by its path in the context.

    Without *dependencies*, the image is a base image of this *flavor*. *wheel* is kinetic's wheel;
    default: that of the running kinetic. *python_image* is the image to start from, in the form of
    `PYTHON_IMAGE`.
    """
    dependencies = dependencies or Dependencies()
    wheel = wheel or installed_wheel()
    context = {f"app/{name}": body for name, body in runner_files().items()}
    context[f"install/{wheel.name}"] = wheel.content
    for option, text in dependencies.parts.items():
        context[f"install/{FILES[option]}"] = text.encode()
    minor = ".".join(python.split(".")[:2])  # pickled code depends on the minor version
    has_jax = flavor == JAX_FLAVOR
    jax = CATEGORIES[category]
    frameworks = [jax if dependencies.brings_jax else f"{jax}=={JAX}", "keras"]
    install = [
        "uv pip install --system --no-cache --compile-bytecode",
        *([f"--find-links {_LIBTPU}"] if has_jax and category == "tpu" else []),
        *map(json.dumps, [*(frameworks if has_jax else []), *RUNNER_NEEDS]),
        f"/tmp/install/{wheel.name}",
        *(f"{option} /tmp/install/{FILES[option]}" for option in dependencies.parts),
    ]
    lines = [
        f"FROM {python_image.replace('{python}', minor)}",
        "USER root",
        f"RUN {_SYSTEM}",
        f"RUN {_UV}",
        f"RUN {_ACCOUNT}",
        "COPY install/ /tmp/install/",
        f"RUN {' '.join(install)} && rm -rf /tmp/install /tmp/uv-*.lock && {_CHOWN}",
        "WORKDIR /app",
        "COPY app/ /app/",
        f"ENV {'KERAS_BACKEND=jax ' if has_jax else ''}PYTHONUNBUFFERED=1",
        *([_GPU] if category == "gpu" else []),
        f"LABEL dev.kinetic.category={category} dev.kinetic.python={minor}",
        f"USER {USER}",
        'CMD ["python3"]',
    ]
    context["Dockerfile"] = "".join(f"{line}\n" for line in lines).encode()
    return context


def runner_files() -> dict[str, bytes]:
    """Return the source files of the installed runner: relative path → content. Reads the disk."""
    files = package_files(PACKAGE / "_runner")
    return {name.partition("/")[2]: body for name, body in files.items()}


def package_files(package: Path) -> dict[str, bytes]:
    """Return the files of the package in folder *package*, without bytecode; reads the disk."""
    return {
        path.relative_to(package.parent).as_posix(): path.read_bytes()
        for folder, _, names in os.walk(package, followlinks=True)  # in a clone, _runner is a link
        for path in (Path(folder, name) for name in names)
        if path.suffix not in (".pyc", ".pyo")
    }


@functools.cache
def installed_wheel() -> Wheel:
    """Return the wheel of the running kinetic, wherever it was imported from.

    Raises:
        ConfigurationError: kinetic isn't installed, so its own dependencies aren't known.
    """
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigurationError(
            f"{DISTRIBUTION} runs from its source without being installed, so kinetic can't put it "
            "into an image; install it, for example with `pip install -e` in its source folder"
        ) from exc
    metadata = {name: installed.read_text(name) or "" for name in ("METADATA", "entry_points.txt")}
    return wheel(package_files(PACKAGE), installed.version, metadata)


def wheel(files: Mapping[str, bytes], version: str, metadata: Mapping[str, str]) -> Wheel:
    """Make kinetic's wheel from *files* and the metadata files *metadata*. No I/O.

    The same input gives the same bytes on every machine.
    """
    stem = f"kinetic_aio-{version}"
    tag = "py3-none-any"
    info = f"{stem}.dist-info"
    entries = {path: files[path] for path in sorted(files)}
    entries |= {f"{info}/{name}": text.encode() for name, text in sorted(metadata.items()) if text}
    entries[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    # Installers need the names in RECORD. Its hashes are optional, and `digest` covers the wheel.
    record = f"{info}/RECORD"
    entries[record] = "".join(f"{path},,\n" for path in [*entries, record]).encode()
    return Wheel(f"{stem}-{tag}.whl", stored_zip(entries))


def stored_zip(entries: Mapping[str, bytes]) -> bytes:
    """Return a zip archive of *entries*, contents by path; equal entries give equal bytes.

    Nothing is compressed, because libraries compress differently, and every entry has the oldest
    time that a zip can name.
    """
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, body in entries.items():
            entry = zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0))
            entry.create_system = 3  # Unix, also if another system makes the archive
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body)
    return buffer.getvalue()


def digest(context: Mapping[str, bytes]) -> str:
    """Return the SHA-256 of the names and contents of *context*, in hexadecimal."""
    hasher = hashlib.sha256()
    for name in sorted(context):
        body = context[name]
        hasher.update(f"{len(name.encode())}:{name}:{len(body)}:".encode())
        hasher.update(body)
    return hasher.hexdigest()


def pack_context(context: Mapping[str, bytes]) -> bytes:
    """Return *context* as a ``tar.gz``, the form in which Cloud Build takes it.

    Equal contexts give equal bytes, so the file has no time.
    """
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name in sorted(context):
            entry = tarfile.TarInfo(name)
            entry.size = len(context[name])
            archive.addfile(entry, io.BytesIO(context[name]))
    return gzip.compress(buffer.getvalue(), mtime=0)
