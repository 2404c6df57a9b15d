"""Find the ComputeClass of GKE that makes the nodes for a job's accelerator."""

from __future__ import annotations

import re

from absl import logging

from kinetic.accelerators import Accelerator
from kinetic.aio.kubernetes.api import Api
from kinetic.errors import AuthError, NotFound

GROUP, KIND = "cloud.google.com/v1", "ComputeClass"
COLLECTION = f"/apis/{GROUP}/computeclasses"


def class_name(accelerator: Accelerator) -> str:
    """Return the name of the class for *accelerator*, such as ``gpu-l4-spot``."""
    body = str(accelerator).removesuffix(":spot").lower()
    name = re.sub(r"[^a-z0-9]+", "-", body).strip("-")
    return f"{name}-spot" if accelerator.spot else name


async def find_class(api: Api, accelerator: Accelerator) -> str:
    """Return the name of the cluster's class for *accelerator*, or "" if there is none.

    CPUs and slices of several hosts use no class.

    Raises:
        Unavailable: The API server doesn't answer.
    """
    if accelerator.kind == "cpu" or accelerator.multi_host:
        return ""
    name = class_name(accelerator)
    try:
        await api.call("GET", f"{COLLECTION}/{name}")
    except NotFound:
        return ""
    except AuthError as exc:  # no Role of a namespace grants this right
        logging.info("can't read ComputeClasses, so jobs use node pools: %s", exc)
        return ""
    return name
