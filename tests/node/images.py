"""Build images for the node: Debian with Python, the pause image, and one for kinetic's runner.

The results stay in a cache, because unpacking Debian takes minutes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kinetic import images
from tests.node.parts import MissingParts, Parts

PYTHON = "localhost/kinetic-tests/python:1"
SANDBOX = "localhost/kinetic-tests/sandbox:1"
JOBS = "localhost/kinetic-tests/jobs:1"
BUILD_S = 900.0
BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
"""The CAs that this machine trusts; a build mounts them to download packages."""

NETWORK = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY")
"""Variables that tell this machine, and so a build, where packages are."""

PYTHON_DOCKERFILE = f"""\
FROM scratch
ADD root.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV SSL_CERT_FILE={BUNDLE}
CMD ["python3"]
"""
SANDBOX_DOCKERFILE = f"FROM {PYTHON}\n" + 'CMD ["sleep", "infinity"]\n'
JOBS_DOCKERFILE = f"""\
FROM {PYTHON}
RUN python3 -m pip install --no-cache-dir cloudpickle google-cloud-storage absl-py
COPY app/ /app/
"""
"""Follows the documentation for users' own images."""


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder that keeps the images."""
    root = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "kinetic-tests" / "node"


@dataclass(frozen=True, slots=True)
class Builder:
    """Build images with buildah, with its storage below *folder*."""

    parts: Parts
    folder: Path

    def program(self) -> Path:
        """Write a script that runs buildah like Cloud Build's builder: ``build --tag NAME .``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        policy = self.folder / "policy.json"
        policy.write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        script = self.folder / "builder"
        script.write_text(
            "#!/bin/sh\n"
            f"export TMPDIR={self.folder}\n"
            f"buildah='{self.parts.buildah} --root {self.folder}/storage "
            f"--runroot {self.folder}/run --storage-driver overlay'\n"
            '[ "$1" = build ] || exec $buildah "$@"\n'
            "shift\n"
            "exec $buildah build --layers --isolation chroot --pull-never --network host "
            f"--signature-policy {policy} --volume {BUNDLE}:{BUNDLE}:ro "
            '"$@"\n'
        )
        script.chmod(0o755)
        return script

    def build(self, name: str, files: Mapping[str, str | Path]) -> None:
        """Build the image *name* from *files*: a Dockerfile and what it copies."""
        context = self.folder / "context"
        shutil.rmtree(context, ignore_errors=True)
        context.mkdir(parents=True)
        for file, body in files.items():
            (context / file).parent.mkdir(parents=True, exist_ok=True)
            if isinstance(body, Path):
                (context / file).hardlink_to(body)
            else:
                (context / file).write_text(body)
        self.run("build", "--tag", name, str(context))

    def save(self, name: str, archive: Path) -> Path:
        """Write an image to a file atomically."""
        part = archive.with_suffix(".part")
        part.unlink(missing_ok=True)
        self.run("push", "--quiet", name, f"docker-archive:{part}:{name}")
        part.rename(archive)
        return archive

    def run(self, *arguments: str) -> str:
        """Run a buildah command and return its output.

        Raises:
            MissingParts: The command failed; the message has the end of its output.
        """
        done = subprocess.run(
            [self.program(), *arguments], capture_output=True, timeout=BUILD_S, check=False
        )
        if done.returncode:
            output = (done.stdout + done.stderr)[-3000:].decode(errors="replace")
            command = f"buildah {' '.join(arguments)}"
            raise MissingParts(f"{command} ended with {done.returncode}:\n{output}")
        return done.stdout.decode()


@contextmanager
def builder(parts: Parts) -> Iterator[Builder]:
    """Provide the builder in the cache to one process at a time."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Builder(parts, folder)


def archives(builder: Builder) -> list[Path]:
    """Return the files of the images that the node starts with; build those that are missing."""
    root = builder.folder / f"{builder.parts.release}.tar"
    if not root.exists():
        _unpack_debian(builder, root)
    network = [f"ENV {name}={os.environ[name]}\n" for name in NETWORK if name in os.environ]
    python = PYTHON_DOCKERFILE + "".join(network)
    digest = _digest(python, SANDBOX_DOCKERFILE, builder.parts.release)
    sandbox = builder.folder / f"sandbox-{digest}.tar"
    if not sandbox.exists():
        builder.build(PYTHON, {"Dockerfile": python, "root.tar": root})
        builder.build(SANDBOX, {"Dockerfile": SANDBOX_DOCKERFILE})
        builder.save(SANDBOX, sandbox)
    with TemporaryDirectory() as app:
        images.write_runner(app)
        paths = Path(app).rglob("*.py")
        runner = {f"app/{path.relative_to(app)}": path.read_text() for path in paths}
    texts = (text for file in sorted(runner.items()) for text in file)
    jobs = builder.folder / f"jobs-{_digest(sandbox.name, JOBS_DOCKERFILE, *texts)}.tar"
    if not jobs.exists():
        for old in builder.folder.glob("jobs-*.tar"):
            old.unlink()
        builder.build(JOBS, {"Dockerfile": JOBS_DOCKERFILE, **runner})
        builder.save(JOBS, jobs)
    return [sandbox, jobs]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _unpack_debian(builder: Builder, archive: Path) -> None:
    """Write a small Debian with Python, like the images ``python:3.x-slim``, to *archive*."""
    root, part = builder.folder / "root", archive.with_suffix(".part")
    shutil.rmtree(root, ignore_errors=True)
    packages = "--include=python3,python3-pip,ca-certificates"
    command = [builder.parts.debootstrap, "--variant=minbase", packages]
    with (builder.folder / "debootstrap.log").open("wb") as log:
        done = subprocess.run(
            [*command, builder.parts.release, root], stdout=log, stderr=log, check=False
        )
    if done.returncode:
        raise MissingParts(f"debootstrap ended with {done.returncode}; see {log.name}")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # lets pip install into the system's Python
    left_out = ("./proc/*", "./sys/*", "./dev/*", "./var/cache/*", "./var/lib/apt/lists/*")
    options = ["--numeric-owner", *(f"--exclude={pattern}" for pattern in left_out)]
    subprocess.run(["tar", "-C", root, *options, "-cf", part, "."], check=True)
    shutil.rmtree(root)
    part.rename(archive)
