"""Open the platform ``pathways``: sets of pods on Kubernetes, their store, and images."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import anyio.to_thread

from kinetic import configuration
from kinetic._messages import suggest
from kinetic.aio.backends.gke import open_storage
from kinetic.aio.kubernetes.access import open_access
from kinetic.aio.kubernetes.api import Api
from kinetic.aio.kubernetes.inventory import layout_in
from kinetic.aio.kubernetes.pathways import PathwaysCluster
from kinetic.aio.kubernetes.sets import KINDS
from kinetic.aio.platforms import BACKENDS, Platform
from kinetic.errors import ConfigurationError

VARIABLE = "KINETIC_MULTIHOST"


async def open_backend(target: configuration.Target, environ: Mapping[str, str]) -> Platform:
    """Open the platform of *target*; send no request to its bucket yet.

    Raises:
        ConfigurationError: There is no such cluster or context, no store is
            configured, or KINETIC_MULTIHOST has an invalid value.
        AuthError: There are no credentials, or they are refused.
        Unavailable: The API server, or Google's API, does not answer.
    """
    value = environ.get(VARIABLE) or "lws"
    kind = value.strip().lower()
    if kind not in KINDS:
        hint = suggest(kind, KINDS, otherwise=f"there are {' and '.join(KINDS)}")
        raise ConfigurationError(f"{VARIABLE}={value!r} isn't a kind of pod sets; {hint}")
    pod_placement, store, images = await anyio.to_thread.run_sync(open_storage, target, environ)
    access = await open_access(target, environ)
    api = Api(access)
    cluster = PathwaysCluster(api, pod_placement, kind=kind)
    return Platform(
        store=store,
        images=images,
        builds=images.builds,
        cluster=cluster,
        layout=partial(layout_in, api, access.pools),
        id_marker=BACKENDS["pathways"].id_marker,
        app="kinetic-pathways",
    )
