"""What goes into an image, as files: the Dockerfile and its context. Pure.

An image has Python of the client's minor version, the accelerator's JAX, what
the runner needs, kinetic itself, the project's dependencies (in a bundled
image), and the runner in ``/app``. The installer resolves all packages together, so
a dependency that needs another JAX fails the build instead of replacing it.
"""

from __future__ import annotations

import base64
import codecs
import functools
import gzip
import hashlib
import importlib.metadata
import io
import json
import os
import re
import tarfile
import textwrap
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from absl import logging

from kinetic.aio.ports import ImageRequest
from kinetic.errors import ConfigurationError, PackError

DISTRIBUTION = "kinetic-aio"
EARLIEST = (1980, 1, 1, 0, 0, 0)
"""The time of every entry: the oldest one a zip can name, and the same on every machine."""

TAG = "py3-none-any"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel under the file name that installers insist on."""

    name: str
    content: bytes


def wheel(files: Mapping[str, bytes], metadata: str, entry_points: str = "") -> Wheel:
    """The wheel of *files*, named relative to the root of an environment; pure.

    The same files and metadata give the same bytes on every machine: nothing is
    compressed, because libraries differ in how.

    Raises:
        ValueError: *metadata* names no distribution or no version.
    """
    name, version = _field(metadata, "Name"), _field(metadata, "Version")
    stem = f"{re.sub(r'[-_.]+', '_', name).lower()}-{version.replace('-', '_')}"
    info = f"{stem}.dist-info"
    entries = {
        **{path: files[path] for path in sorted(files)},
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": (
            f"Wheel-Version: 1.0\nGenerator: kinetic\nRoot-Is-Purelib: true\nTag: {TAG}\n"
        ).encode(),
        **({f"{info}/entry_points.txt": entry_points.encode()} if entry_points else {}),
    }
    rows = [f"{path},{_digest(body)},{len(body)}" for path, body in entries.items()]
    entries[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for path, body in entries.items():
            entry = zipfile.ZipInfo(path, EARLIEST)
            entry.create_system = 3  # Unix, wherever it is made
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, body)
    return Wheel(f"{stem}-{TAG}.whl", buffer.getvalue())


def package_files(package: Path) -> dict[str, bytes]:
    """Every file of the package in folder *package* that a wheel of it has; reads the disk."""
    found: dict[str, bytes] = {}
    folders = [package]
    for folder in folders:  # grows: a link inside (the runner's, in a checkout) is followed
        for path in sorted(folder.iterdir()):
            if path.is_dir() and path.name != "__pycache__":
                folders.append(path)
            elif path.is_file() and path.suffix not in (".pyc", ".pyo"):
                found[path.relative_to(package.parent).as_posix()] = path.read_bytes()
    return found


@functools.cache
def installed_wheel() -> Wheel:
    """The wheel of the kinetic that is running, wherever it was imported from; made once.

    Raises:
        ConfigurationError: It was never installed, so nobody knows what it depends on.
    """
    try:
        installed = importlib.metadata.distribution(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError as exc:
        raise ConfigurationError(
            f"{DISTRIBUTION} runs here without being installed, so no image can be given it; "
            "install it, e.g. with `pip install -e` on its source"
        ) from exc
    metadata = installed.read_text("METADATA") or ""
    entry_points = installed.read_text("entry_points.txt") or ""
    return wheel(package_files(PACKAGE), metadata, entry_points)


def _field(metadata: str, name: str) -> str:
    header = metadata.partition("\n\n")[0]
    match = re.search(rf"^{name}: *(\S+)", header, re.MULTILINE)
    if match is None:
        raise ValueError(f"the metadata of {DISTRIBUTION} has no {name}")
    return match[1]


def _digest(body: bytes) -> str:
    encoded = base64.urlsafe_b64encode(hashlib.sha256(body).digest())
    return f"sha256={encoded.rstrip(b'=').decode()}"


ENTRY = "remote_runner.py"
PACKAGE = Path(__file__).parents[2]
"""The folder of kinetic; ``_runner`` in it links to the runner in a clone."""

_SCRIPT = '''"""The runner of kinetic {version}, in one file; its place is /app/remote_runner.py."""

import base64
import io
import os
import runpy
import sys
import tempfile
import zipfile

FILES = """
{files}
"""

here = os.path.dirname(os.path.realpath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.realpath(entry or ".") != here]
folder = tempfile.mkdtemp(prefix="kinetic-runner-")
with zipfile.ZipFile(io.BytesIO(base64.b64decode(FILES))) as archive:
    archive.extractall(folder)
runpy.run_path(os.path.join(folder, "{entry}"), run_name="__main__")
'''


def runner_files() -> dict[str, bytes]:
    """The runner that is part of this kinetic, by the names of its files; reads the disk."""
    folder = Path(os.path.realpath(PACKAGE / "_runner"))
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.py"))
    }


def single_file(files: Mapping[str, bytes], version: str) -> str:
    """A script that is the runner of *files*: it unpacks them and runs their entry; pure."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(files):
            archive.writestr(zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0)), files[name])
    encoded = base64.b64encode(buffer.getvalue()).decode()
    lines = "\n".join(textwrap.wrap(encoded, 96))
    return _SCRIPT.format(version=version, files=lines, entry=ENTRY)


ACCELERATOR_PACKAGES = frozenset({"jax", "jaxlib", "libtpu", "libtpu-nightly"})
KEEP = "kn:keep"

_NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)")
_COMMENT = re.compile(r"(^|\s)#.*$")
_REMOTE = re.compile(r"(?:git|hg|svn|bzr)\+(?!file:)\w+:|https?:|ftps?:|gs:|\w+@[\w.]+:")
_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s@$]+@")
_ARCHIVE = re.compile(r"\.(?:whl|zip|tar(?:\.\w+)?|tgz)$")
_FILE_OPTIONS = frozenset({"-e", "--editable", "-r", "--requirement", "-c", "--constraint"})
_NAMING_OPTIONS = frozenset({"-e", "--editable", "-r", "--requirement"})
_PLACE_OPTIONS = frozenset({"-f", "--find-links", "-i", "--index-url", "--extra-index-url"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Dependencies:
    """What to install: ``text`` is a requirements file, ``source`` where it comes from.

    ``notices`` are sentences for the user, one for each thing that was dropped
    or looks wrong.
    """

    source: Path | None = None
    text: str = ""
    notices: tuple[str, ...] = ()

    @property
    def wanted(self) -> bool:
        """Whether there is anything to install."""
        bare = (_bare(lines) for _, lines in _logical_lines(self.text))
        return any(line and _installs(line) for line in bare)


def find_dependencies(
    entry_dir: Path, root: Path | None, *, own_accelerator: bool = False
) -> Dependencies:
    """Read what the project of a function in *entry_dir* asks for.

    *own_accelerator* keeps what is else left to the image, for where there is none.

    Raises:
        PackError: The file cannot be read, or asks for what lies on this
            machine only; ``culprit`` is the file and the line.
    """
    notices: list[str] = []
    for directory in _upwards(entry_dir, root):
        requirements, pyproject = directory / "requirements.txt", directory / "pyproject.toml"
        if requirements.is_file():
            found = filtered(_decoded(requirements), requirements, own_accelerator)
        elif pyproject.is_file() and (lines := _of_pyproject(pyproject, notices)) is not None:
            text = "".join(f"{line}\n" for line in lines)
            found = filtered(text, pyproject, own_accelerator)
        else:
            continue
        return Dependencies(
            source=found.source, text=found.text, notices=(*notices, *found.notices)
        )
    return Dependencies(notices=tuple(notices))


def _upwards(entry_dir: Path, root: Path | None) -> Iterator[Path]:
    yield entry_dir
    if root is not None and entry_dir.is_relative_to(root):
        yield from (one for one in entry_dir.parents if one.is_relative_to(root))


def _decoded(file: Path) -> str:
    """The text of a file; PowerShell writes requirements as UTF-16."""
    try:
        content = file.read_bytes()
        wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        return content.decode("utf-16" if wide else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as exc:
        raise PackError(f"{file} cannot be read: {exc}", culprit=str(file)) from exc


def _of_pyproject(file: Path, notices: list[str]) -> list[str] | None:
    """``[project.dependencies]``; None when there is no ``[project]``."""
    try:
        content = tomllib.loads(_decoded(file))
    except tomllib.TOMLDecodeError as exc:
        raise PackError(f"{file} is not valid TOML: {exc}", culprit=str(file)) from exc
    tool: Any = content.get("tool", {})
    project: Any = content.get("project")
    if project is None:
        if "poetry" in tool and "dependencies" in tool["poetry"]:
            notices.append(
                f"The dependencies in [tool.poetry] of {file} are not read: export them to a "
                "requirements.txt beside it, or list them in [project.dependencies]."
            )
        _notice_groups(content, file, notices)
        return None
    if not {"dependencies"} & {*project, *project.get("dynamic", ())}:
        _notice_groups(content, file, notices)
    lines: list[Any] = project.get("dependencies", [])
    if type(lines) is not list or not all(isinstance(line, str) for line in lines):
        raise PackError(f"{file}: [project.dependencies] is no list of strings", culprit=str(file))
    if not lines and "dependencies" in project.get("dynamic", []):
        notices.append(
            f"The dependencies of {file} are dynamic and are not read: export them to a "
            "requirements.txt beside it."
        )
    return lines


def _notice_groups(content: dict[str, Any], file: Path, notices: list[str]) -> None:
    """Say that a project's dependency groups stay at home, where it names no other dependencies."""
    if groups := ", ".join(content.get("dependency-groups", ())):
        notices.append(
            f"The [dependency-groups] of {file} ({groups}) are not installed for jobs: list what "
            "jobs need in [project.dependencies], or in a requirements.txt beside it."
        )


def filtered(text: str, source: Path, own_accelerator: bool = False) -> Dependencies:
    """What of *text*, in the format of a requirements file, goes into an image; pure.

    Raises:
        PackError: It asks for what lies on this machine only.
    """
    kept: list[str] = []
    notices: list[str] = []
    for number, lines in _logical_lines(text):
        bare = _bare(lines)
        name = "" if bare.startswith("-") else _normal_name(bare)
        keeps = own_accelerator or any(KEEP in line.partition("#")[2] for line in lines)
        if name == "keras-kinetic":
            notices.append(
                f"{source}, line {number}: keras-kinetic is not installed in the job: it would "
                "overwrite this package, which is there already."
            )
        elif name == "kinetic-aio":
            pass
        elif name in ACCELERATOR_PACKAGES and not keeps:
            notices.append(
                f"{source}, line {number}: {bare!r} is left to the image, which has the {name} "
                f"of its accelerator; write '# {KEEP}' behind it to install yours."
            )
        else:
            _refuse_local(bare, source, number)
            if _PASSWORD.search(bare):
                notices.append(
                    f"{source}, line {number} has a password in it, which ends up in the image "
                    "and its build log."
                )
            kept += lines
    return Dependencies(
        source=source, text="".join(f"{line}\n" for line in kept), notices=tuple(notices)
    )


def _logical_lines(text: str) -> Iterator[tuple[int, list[str]]]:
    """The number of the first line, and the lines that backslashes make one of."""
    joined: list[str] = []
    first = 1
    for number, line in enumerate(text.splitlines(), 1):
        if not joined:
            first = number
        joined.append(line.rstrip())
        # A comment goes to the end of its line, whatever that is.
        if not line.rstrip().endswith("\\") or line.lstrip().startswith("#"):
            yield first, joined
            joined = []
    if joined:
        yield first, joined


def _bare(lines: list[str]) -> str:
    """One requirement or option on one line, without comments."""
    pieces = (_COMMENT.sub("", line) for line in lines)
    return " ".join(piece.removesuffix("\\").strip() for piece in pieces).strip()


def _installs(bare: str) -> bool:
    """Whether a line asks for something, and not only says how to install it."""
    return not bare.startswith("-") or _option(bare)[0] in _NAMING_OPTIONS


def _normal_name(bare: str) -> str:
    """The name of the package as indexes compare it; empty for anything else."""
    match = _NAME.match(bare)
    if match is None or bare[match.end() :].lstrip().startswith((":", "/", "\\")):
        return ""
    return re.sub(r"[-_.]+", "-", match[1]).lower()


def _refuse_local(bare: str, source: Path, number: int) -> None:
    option, value = "", bare
    if bare.startswith("-"):
        option, value = _option(bare)
        if option not in _FILE_OPTIONS | _PLACE_OPTIONS:
            return
    if not _is_local(value, must_be_a_place=bool(option)):
        return
    raise PackError(
        f"{source}, line {number}: {bare!r} lies on this machine only, so a job cannot install "
        "it. Code of the project ships by itself; name packages by an index or a URL.",
        culprit=f"{source}:{number}",
    )


def _option(bare: str) -> tuple[str, str]:
    """``--name=value``, ``--name value`` and ``-nvalue``."""
    if not bare.startswith("--"):
        return bare[:2], bare[2:].lstrip(" =")
    name, _, value = re.sub(r"[=\s]", " ", bare, count=1).partition(" ")
    return name, value.strip()


def _is_local(value: str, *, must_be_a_place: bool) -> bool:
    """Whether a requirement, or the value of an option, names something on this machine."""
    _, at, url = value.partition("@")
    place = url.strip() if at and not _REMOTE.match(value) else value
    place = place.split(" ")[0].split(";")[0].strip("'\"")
    if _REMOTE.match(place):
        return False
    if must_be_a_place or at or place.startswith(("file:", ".", "/", "\\", "~", "git+file:")):
        return bool(place)
    without_extras = place.partition("[")[0]
    return bool("/" in without_extras or "\\" in place or _ARCHIVE.search(without_extras))


def dependencies_of(
    request: ImageRequest, said: set[str], *, own_accelerator: bool = False
) -> Dependencies:
    """The dependencies of the project of *request*; reads files.

    Its notices are logged, those that are in *said* not again. *own_accelerator*
    keeps what is else left to the image.

    Raises:
        PackError: The file cannot be read, or names what is on this machine only.
    """
    if request.entry_dir is None:
        return Dependencies()
    found = find_dependencies(request.entry_dir, request.root, own_accelerator=own_accelerator)
    for notice in found.notices:
        if notice not in said:
            said.add(notice)
            logging.warning("%s", notice)
    return found


RUNNER_NEEDS = ("absl-py>=2.1", "cloudpickle>=3.1.1", "google-cloud-storage>=2.18")
"""All that the runner imports beside Python's own library."""

CATEGORIES: Mapping[str, str] = MappingProxyType(
    {"cpu": "jax", "gpu": "jax[cuda12]", "tpu": "jax[tpu]"}
)
"""The kinds of images, and the JAX of each."""

JAX = "0.10.2"
"""The JAX of every image that this release builds: the newest one for all Pythons it supports."""

_LIBTPU = "https://storage.googleapis.com/jax-releases/libtpu_releases.html"
PYTHON_IMAGE = "python:{python}-slim"
"""What images begin with: Debian with Python, of the minor version in place of ``{python}``."""

USER = 10001
"""The user ID that jobs have in the images that kinetic builds.

It is a number, because Kubernetes cannot tell whether a name means root.
"""

_SYSTEM = (
    "(command -v cc && command -v git) || (apt-get update"
    " && apt-get install -y --no-install-recommends build-essential git"
    " && rm -rf /var/lib/apt/lists/*)"
)
_UV = '(command -v uv) || python3 -m pip install --no-cache-dir "uv>=0.8"'
_ACCOUNT = f"getent passwd {USER} || useradd --create-home --uid {USER} kinetic"
_OWNED = (
    f'find "$(python3 -c \'import sysconfig; print(sysconfig.get_path("data"))\')"'
    f" -xdev -type d -exec chown {USER} {{}} +"
)
"""A job on a base image installs its dependencies itself, where only root could write."""

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
    text = _dockerfile(category, start, python, wheel, requirements)
    context["Dockerfile"] = text.encode()
    return context


def _dockerfile(category: str, start: str, python: str, wheel: Wheel, requirements: str) -> str:
    packages = [_jax(category, requirements), "keras", *RUNNER_NEEDS]
    install = " ".join(
        [
            "uv pip install --system --no-cache --compile-bytecode",
            *(f"--find-links {_LIBTPU}" for _ in [None] if category == "tpu"),
            *(json.dumps(one) for one in packages),
            f"/tmp/install/{wheel.name}",
            *("-r /tmp/install/requirements.txt" for _ in [None] if requirements),
        ]
    )
    return "\n".join(
        [
            f"FROM {start}",
            "USER root",
            f"RUN {_SYSTEM}",
            f"RUN {_UV}",
            f"RUN {_ACCOUNT}",
            "COPY install/ /tmp/install/",
            f"RUN {install} && rm -rf /tmp/install /tmp/uv-*.lock && {_OWNED}",
            "WORKDIR /app",
            "COPY app/ /app/",
            "ENV KERAS_BACKEND=jax PYTHONUNBUFFERED=1",
            *([_GPU] if category == "gpu" else []),
            f"LABEL dev.kinetic.category={category} dev.kinetic.python={minor(python)}",
            f"USER {USER}",
            'CMD ["python3"]',
            "",
        ]
    )


def _jax(category: str, requirements: str) -> str:
    """Pin JAX, unless the filtered *requirements* keep their own."""
    names = {_normal_name(_bare(lines)) for _, lines in _logical_lines(requirements)}
    jax = CATEGORIES[category]
    return jax if names & ACCELERATOR_PACKAGES else f"{jax}=={JAX}"


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
