"""Start the runner in an image that may lack it, with nothing but the standard library.

The client sends the text of this module, followed by a call of `start`, and a pod executes it as
``python3 -c TEXT -u /app/remote_runner.py``. If the image has that file, the file replaces this
process. Otherwise this module installs the packages that the runner needs and the image lacks,
downloads the runner from the store, and starts it.

Any Python from 3.6 on can execute this module, so that it can report a wrong version.
"""

import sys

sys.path[:] = [entry for entry in sys.path if entry]  # "" is the working directory of the image

import glob
import hashlib
import importlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import zipfile
from typing import Any, Dict, List

EXIT_FINAL, EXIT_RETRY = 42, 43
"""The same as in `wire`."""

PACKAGES = "KINETIC_RUNNER_PACKAGES"
"""The variable that tells the runner where the installed packages are."""

PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0, 15.0)
"""How long to wait between tries to download the runner, in seconds.

A node's metadata server may take 45 s to know a new pod.
"""

INSTEAD = "use an image that contains the runner, such as one by `kinetic build-image`"


class Unfit(Exception):
    """The image, or the network, keeps the runner from starting; ``code`` is the exit code."""

    def __init__(self, problem: str, code: int = EXIT_FINAL) -> None:
        super().__init__(problem)
        self.code = code


def start(plan: Dict[str, Any]) -> None:
    """Replace this process by the runner, or exit after a message that says what is wrong.

    *plan* has the submitter's ``python``, the ``needs`` (requirement and module of each package),
    the ``constraints`` by package, and the runner's archive: its ``digest``, and either ``file`` or
    ``bucket`` and ``object``.
    """
    command = [sys.executable or "python3", *sys.argv[1:]]
    if not os.path.exists(command[-1]):
        # Without a handler, the first process of a container ignores SIGTERM.
        signal.signal(signal.SIGTERM, _stop)
        try:
            command[-1] = _provide(plan, command[-1])
        except (Unfit, OSError, zipfile.BadZipFile) as exc:
            _say("this job cannot be run: " + " ".join(str(exc).split()))
            sys.exit(getattr(exc, "code", EXIT_RETRY))
    os.execvp(command[0], command)


def _stop(*_: object) -> None:
    _say("the job was asked to stop before its start")
    os._exit(EXIT_RETRY)


def _say(message: str) -> None:
    sys.stderr.write("kinetic: " + message + "\n")
    sys.stderr.flush()


def _provide(plan: Dict[str, Any], missing: str) -> str:
    """Install what is missing into a new folder, and return the path of the runner there."""
    began = time.monotonic()
    version = sys.version.split()[0]
    if version.split(".")[:2] != plan["python"].split(".")[:2]:
        raise Unfit(
            "its image has Python %s, and the job was submitted from Python %s; use an image with "
            "the same minor version" % (version, plan["python"])
        )
    folder = tempfile.mkdtemp(prefix="kinetic-")
    requirements = [need for need, module in plan["needs"] if not _has_module(module)]
    _say("this image has no %s, so this pod installs kinetic's runner" % missing)
    if requirements:
        os.environ[PACKAGES] = os.path.join(folder, "packages")
        _install(requirements, plan["constraints"], folder)
        sys.path.append(os.environ[PACKAGES])
        importlib.invalidate_caches()
    archive = os.path.join(folder, "runner.zip")
    _fetch(plan, archive)
    with open(archive, "rb") as file:
        if hashlib.sha256(file.read()).hexdigest() != plan["digest"]:
            raise Unfit("the runner in the store has other content than was submitted")
    with zipfile.ZipFile(archive) as opened:
        opened.extractall(os.path.join(folder, "app"))
    _say("installed the runner in %.1f s" % (time.monotonic() - began))
    return os.path.join(folder, "app", os.path.basename(missing))


def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:  # the parent package is missing
        return False


def _install(requirements: List[str], constraints: Dict[str, str], folder: str) -> None:
    """Install *requirements* into ``packages`` of *folder*."""
    metadata = importlib.import_module("importlib.metadata")
    versions = dict(constraints)
    for found in metadata.distributions():
        name = re.sub("[-_.]+", "-", found.metadata["Name"] or "").lower()
        # Packages of the image come first on the path, so the installer must refuse a set that
        # doesn't fit them.
        if name in versions:
            versions[name] = "%s==%s" % (name, found.version)
    file = os.path.join(folder, "constraints.txt")
    with open(file, "w") as opened:
        opened.write("\n".join(versions.values()) + "\n")
    command = [*_installer(), "--no-compile", "--no-cache-dir", "--constraint", file]
    command += ["--target", os.environ[PACKAGES], *requirements]
    # The folder has no module that could hide one of pip.
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise Unfit(
            "cannot install %s: %s; let pods reach a package index (for your own, capture "
            "PIP_INDEX_URL or UV_INDEX_URL), or %s"
            % (", ".join(requirements), _reason(done.stdout.splitlines()), INSTEAD),
            EXIT_RETRY,
        )


def _reason(lines: List[str]) -> str:
    """Return the line of an installer's output that says most about its failure."""
    for line in lines:
        if "connection broken" in line:
            return line[line.index("connection broken") :][:200]
    told = [line.strip() for line in lines if line.strip()]
    errors = [line for line in told if line.lower().startswith("error")]
    causes = [line for line in told if line.startswith("cause:")]  # of uv; the last is the deepest
    return " ".join((errors or told[-1:])[:1] + causes[-1:])[:300]


def _installer() -> List[str]:
    """Return the command that installs packages: uv, pip, or the pip that ensurepip has."""
    uv = shutil.which("uv")
    if uv is not None:
        return [uv, "pip", "install", "--python", sys.executable]
    options = ["install", "--no-input", "--disable-pip-version-check"]
    if _has_module("pip"):
        return [sys.executable, "-m", "pip", *options]
    spec = importlib.util.find_spec("ensurepip")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for wheel in glob.glob(os.path.join(folder, "_bundled", "pip-*.whl")):
            return [sys.executable, os.path.join(wheel, "pip"), *options]
    raise Unfit("its image has no runner, and neither uv nor pip to install it; " + INSTEAD)


def _fetch(plan: Dict[str, Any], path: str) -> None:
    """Copy the runner's archive from the store to *path*."""
    if "file" in plan:
        shutil.copyfile(plan["file"], path)
        return
    for pause in (*PAUSES_S, None):
        try:
            _download(plan["bucket"], plan["object"], path)
            return
        except ImportError as exc:  # packages of the image don't fit each other
            raise Unfit("%s; %s" % (exc, INSTEAD)) from exc
        except Exception as exc:
            if pause is None:
                raise Unfit(
                    "cannot read gs://%s/%s: %s; give the pods' service account "
                    "roles/storage.objectUser on the bucket"
                    % (plan["bucket"], plan["object"], str(exc)[:200]),
                    EXIT_RETRY,
                ) from exc
            time.sleep(pause)


def _download(bucket: str, name: str, path: str) -> None:
    """Copy an object of Cloud Storage to *path*, with the credentials that the runner uses."""
    storage = importlib.import_module("google.cloud.storage")
    options: Dict[str, Any] = {}
    emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
    if emulator:
        options["credentials"] = importlib.import_module(
            "google.auth.credentials"
        ).AnonymousCredentials()
        emulator = emulator if "://" in emulator else "http://" + emulator
    override = os.environ.get("CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE", "").rstrip("/")
    endpoint = emulator.rstrip("/") or re.sub("/storage/v1$", "", override)
    if endpoint:
        options["client_options"] = {"api_endpoint": endpoint}
    client = storage.Client("kinetic", **options)
    payer = os.environ.get("KINETIC_BILLING_PROJECT") or None
    client.bucket(bucket, user_project=payer).blob(name).download_to_filename(path, timeout=60)
