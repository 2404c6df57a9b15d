"""Find the ComputeClass of GKE that makes the nodes for a job's accelerator."""

from __future__ import annotations

import asyncio
import re

from absl import logging

from kinetic.accelerators import Accelerator
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import AuthError, NotFound

GROUP, KIND = "cloud.google.com/v1", "ComputeClass"
COLLECTION = f"/apis/{GROUP}/computeclasses"

REUSED_S = 60.0
"""How long kinetic reuses an answer, in seconds. Meanwhile, it doesn't notice new or removed
classes."""


def class_name(accelerator: Accelerator) -> str:
    """Return the name of the class for *accelerator*, such as ``gpu-l4-spot``."""
    body = str(accelerator).removesuffix(":spot").lower()
    name = re.sub(r"[^a-z0-9]+", "-", body).strip("-")
    return f"{name}-spot" if accelerator.spot else name


class ComputeClasses:
    """Look up the classes of the cluster that *api* connects to, by accelerator."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._cache: dict[str, tuple[float, str]] = {}
        self._lock = asyncio.Lock()

    async def find(self, accelerator: Accelerator) -> str:
        """Return the name of the class for *accelerator*, or "" if there is none.

        CPUs and slices of several hosts use no class. If the credentials lack the permission to
        read classes, the answer is also "".

        Raises:
            Unavailable: The API server doesn't answer.
        """
        if accelerator.kind == "cpu" or accelerator.multi_host:
            return ""
        name = class_name(accelerator)
        async with self._lock:
            now = asyncio.get_running_loop().time()
            until, found = self._cache.get(name, (0.0, ""))
            if until < now:
                found = name if await self._exists(name) else ""
                self._cache[name] = (now + REUSED_S, found)
        return found

    async def _exists(self, name: str) -> bool:
        try:
            await self._api.call("GET", f"{COLLECTION}/{name}")
        except NotFound:
            return False
        except AuthError as exc:
            logging.info("can't read ComputeClasses, so jobs use node pools: %s", exc)
            return False
        return True
