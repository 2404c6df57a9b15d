"""Images for the node: Debian with Python to begin with, and one that kinetic's runner runs in.

What is made once is kept in the cache: to unpack a Debian takes a minute, or some.
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
"""The authorities that this machine trusts: a build fetches packages the way the machine does."""

NETWORK = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "UV_INDEX_URL", "HTTPS_PROXY", "HTTP_PROXY")
"""What a build has to know where this machine does: where packages are."""

FIRST = f"""\
FROM scratch
ADD root.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ENV SSL_CERT_FILE={BUNDLE}
CMD ["python3"]
"""
OF_SANDBOX = f"FROM {PYTHON}\n" + 'CMD ["sleep", "infinity"]\n'
OF_JOBS = f"""\
FROM {PYTHON}
RUN python3 -m pip install --no-cache-dir cloudpickle google-cloud-storage absl-py
COPY app/ /app/
"""
"""Written as the documentation tells users to write theirs."""


def cache(environ: Mapping[str, str] = os.environ) -> Path:
    """Where they are kept."""
    place = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(place) / "kinetic-tests" / "node"


@dataclass(frozen=True, slots=True)
class Kitchen:
    """Builds images with buildah, in a storage of its own below *folder*."""

    parts: Parts
    folder: Path

    def program(self) -> Path:
        """buildah, as Cloud Build's builder is called: ``PROGRAM build --tag NAME .``."""
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
        """Build the image *name* of a Dockerfile and what it copies."""
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
        """Write an image to a file, whole or not at all."""
        part = archive.with_suffix(".part")
        part.unlink(missing_ok=True)
        self.run("push", "--quiet", name, f"docker-archive:{part}:{name}")
        part.rename(archive)
        return archive

    def run(self, *words: str) -> str:
        """One command of buildah's.

        Raises:
            MissingParts: It failed; with its last words.
        """
        done = subprocess.run(
            [self.program(), *words], capture_output=True, timeout=BUILD_S, check=False
        )
        if done.returncode:
            said = (done.stdout + done.stderr)[-3000:].decode(errors="replace")
            raise MissingParts(f"buildah {' '.join(words)} ended with {done.returncode}:\n{said}")
        return done.stdout.decode()


@contextmanager
def kitchen(parts: Parts) -> Iterator[Kitchen]:
    """The one in the cache; one process has it at a time."""
    folder = cache()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Kitchen(parts, folder)


def archives(kitchen: Kitchen) -> list[Path]:
    """The files of the images that the node begins with; made now where they are not there."""
    root = kitchen.folder / f"{kitchen.parts.release}.tar"
    if not root.exists():
        _unpack_debian(kitchen, root)
    known = [f"ENV {name}={os.environ[name]}\n" for name in NETWORK if name in os.environ]
    first = FIRST + "".join(known)
    sandbox = kitchen.folder / f"sandbox-{_digest(first, OF_SANDBOX, kitchen.parts.release)}.tar"
    if not sandbox.exists():
        kitchen.build(PYTHON, {"Dockerfile": first, "root.tar": root})
        kitchen.build(SANDBOX, {"Dockerfile": OF_SANDBOX})
        kitchen.save(SANDBOX, sandbox)
    with TemporaryDirectory() as app:
        images.write_runner(app)
        runner = {f"app/{one.relative_to(app)}": one.read_text() for one in Path(app).rglob("*.py")}
    made_of = _digest(
        sandbox.name, OF_JOBS, *(word for one in sorted(runner.items()) for word in one)
    )
    jobs = kitchen.folder / f"jobs-{made_of}.tar"
    if not jobs.exists():
        for old in kitchen.folder.glob("jobs-*.tar"):
            old.unlink()
        kitchen.build(JOBS, {"Dockerfile": OF_JOBS, **runner})
        kitchen.save(JOBS, jobs)
    return [sandbox, jobs]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]


def _unpack_debian(kitchen: Kitchen, archive: Path) -> None:
    """A small Debian with Python, as the images called ``python:3.x-slim`` are."""
    root, part = kitchen.folder / "root", archive.with_suffix(".part")
    shutil.rmtree(root, ignore_errors=True)
    packages = "--include=python3,python3-pip,ca-certificates"
    command = [kitchen.parts.debootstrap, "--variant=minbase", packages]
    with (kitchen.folder / "debootstrap.log").open("wb") as log:
        done = subprocess.run(
            [*command, kitchen.parts.release, root], stdout=log, stderr=log, check=False
        )
    if done.returncode:
        raise MissingParts(f"debootstrap ended with {done.returncode}; see {log.name}")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()  # here pip is nobody's rival
    left = ("./proc/*", "./sys/*", "./dev/*", "./var/cache/*", "./var/lib/apt/lists/*")
    skipped = [f"--exclude={one}" for one in left]
    subprocess.run(["tar", "-C", root, "--numeric-owner", *skipped, "-cf", part, "."], check=True)
    shutil.rmtree(root)
    part.rename(archive)
