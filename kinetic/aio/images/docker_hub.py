"""Let builds use Docker Hub credentials in Secret Manager; Docker Hub limits anonymous pulls."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any

from absl import logging

from kinetic.aio._net.google import GoogleClient, GoogleRequest
from kinetic.aio._net.http import HttpError
from kinetic.aio._net.retry import RetryPolicy
from kinetic.errors import BackendError

USERNAME, TOKEN = "dockerhub-username", "dockerhub-token"
"""The names of the two secrets."""

RETRY_S = 10.0
"""How long to retry the request for the token's secret, in seconds."""

_VARIABLES = {USERNAME: "DOCKERHUB_USERNAME", TOKEN: "DOCKERHUB_TOKEN"}
_LOGIN = 'docker login --username "$$DOCKERHUB_USERNAME" --password-stdin <<< "$$DOCKERHUB_TOKEN"'


async def has_token(project: str, environ: Mapping[str, str]) -> bool:
    """Return whether *project* has an enabled Docker Hub token that the user may read.

    This sends one request.
    """
    google = GoogleClient(environ, RetryPolicy(total_s=RETRY_S), idle_s=RETRY_S)
    path = f"/v1/{_secret_version(urllib.parse.quote(project, safe=''), TOKEN)}"
    try:
        answer = await google.call(GoogleRequest("secretmanager", path))
    except (HttpError, BackendError) as exc:
        logging.info("building without Docker Hub credentials: %s", exc)
        return False
    finally:
        await google.aclose()
    return answer.get("state") == "ENABLED"


def login_step(project: str, image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a build step that logs in to Docker Hub, and the secrets that the step reads.

    The step runs in *image*.
    """
    variables = [*_VARIABLES.values()]
    step = {"name": image, "entrypoint": "bash", "args": ["-c", _LOGIN], "secret_env": variables}
    secrets = [
        {"version_name": _secret_version(project, name), "env": variable}
        for name, variable in _VARIABLES.items()
    ]
    return step, {"secret_manager": secrets}


def _secret_version(project: str, name: str) -> str:
    return f"projects/{project}/secrets/{name}/versions/latest"
