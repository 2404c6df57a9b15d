"""Which environment variables a job gets: pure functions of a mapping."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

from absl import logging

from kinetic._runner.protocol.wire import BILLING_PROJECT, SHARED_TMPDIR
from kinetic.errors import ConfigurationError

__all__ = ["base_environment", "capture", "storage_environment"]

_PROCESS_VARIABLES = {
    *("PATH", "HOME", "SHELL", "USER", "LOGNAME", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"),
    *("TMPDIR", "TEMP", "TMP", "SSH_AUTH_SOCK", "KUBERNETES_SERVICE_HOST", "KERAS_BACKEND"),
    *("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV"),
    *("LD_LIBRARY_PATH", "LD_PRELOAD", "DYLD_LIBRARY_PATH", "DYLD_INSERT_LIBRARIES"),
}
"""Variables of this process and machine, which a pattern with ``*`` never captures."""

_SECRET = re.compile(r"TOKEN|SECRET|KEY|PASSWORD|CREDENTIAL", re.IGNORECASE)

_BASE_VARIABLES = {
    *("PATH", "HOME", "SHELL", "USER", "LOGNAME", "TZ", "LANG", "LANGUAGE"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    "KINETIC_LOCAL_FRESH",  # a worker's items then import their packages themselves
}
"""Variables that each job on this machine gets."""


_STORAGE_VARIABLES = (
    *("GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG"),
    *("STORAGE_EMULATOR_HOST", "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE"),
    BILLING_PROJECT,
)


MAX_VARIABLE_BYTES = 128 * 1024
"""Maximum bytes of a captured variable, with its name: the limit of Linux (MAX_ARG_STRLEN)."""


def capture(patterns: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environ* that *patterns* match; call this once per submission.

    A pattern is a name, or the beginning of names followed by ``*``. A pattern with ``*`` never
    matches a variable that belongs to this process or machine, such as ``PATH`` or ``VIRTUAL_ENV``:
    give its full name. The result leaves out names that aren't set.

    One warning lists the captured names that look like those of secrets.

    Raises:
        ConfigurationError: A variable is larger than `MAX_VARIABLE_BYTES`.
    """
    captured: dict[str, str] = {}
    for pattern in patterns:
        if not pattern.endswith("*"):
            captured |= {pattern: environ[pattern]} if pattern in environ else {}
            continue
        captured |= {
            name: value
            for name, value in environ.items()
            if name.startswith(pattern[:-1]) and name not in _PROCESS_VARIABLES
        }
    for name, value in captured.items():
        size = len(os.fsencode(f"{name}={value}")) + 1  # a zero byte ends it
        if size > MAX_VARIABLE_BYTES:
            raise ConfigurationError(
                f"capture_env_vars has {name}, which has {size:,} bytes; the kernel starts no "
                f"program with a variable of more than {MAX_VARIABLE_BYTES:,} bytes. Pass it "
                "as an argument of the function, or write it to a file of the project"
            )
    if secrets := sorted(name for name in captured if _SECRET.search(name)):
        logging.warning(
            "the job gets environment variables that look like secrets: %s", ", ".join(secrets)
        )
    return captured


def storage_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environ* by which a local job reaches Cloud Storage."""
    return {name: environ[name] for name in _STORAGE_VARIABLES if name in environ}


def base_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of *environ* that every job on this machine gets without a pattern.

    These variables name the user, the programs, the certificates, the language, the time
    zone and the proxies of this machine. A pod gets none of them: its image has its own.
    A pattern must capture any other variable, such as ``PYTHONPATH``, ``CUDA_VISIBLE_DEVICES`` or
    a token. So a job doesn't depend on the terminal from which you start it.

    ``TMPDIR`` arrives as `SHARED_TMPDIR`: in this folder, each job has one of its own. A job of a
    job has it beside that one's.
    """
    base = {
        name: value
        for name, value in environ.items()
        if name in _BASE_VARIABLES or name.startswith("LC_")
    }
    if folder := environ.get(SHARED_TMPDIR) or environ.get("TMPDIR"):
        base[SHARED_TMPDIR] = os.path.abspath(folder)
    return base
