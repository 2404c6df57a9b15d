"""What many submissions share in the store: there when it is needed, and collected by its age.

Nobody deletes shared content, for nobody knows who else uses it. A bucket's own
rule does, by the time it was created or renewed last. So whoever uses it renews
that time, not on each use but once it is older than `RENEWED_S`.
"""

from __future__ import annotations

import time
from pathlib import Path

from kinetic.aio.ports import ObjectInfo, Store

__all__ = ["DAY_S", "RENEWED_S", "ensure", "is_fresh"]

DAY_S = 24 * 3600.0
RENEWED_S = 7 * DAY_S
"""What was renewed within this time is used as it is; a rule must wait for longer (see the guide
to Kubernetes): this, and the time that a job may take from its submission to its start."""


def is_fresh(info: ObjectInfo, within: float = RENEWED_S) -> bool:
    """Whether it was created or renewed in the last *within* seconds."""
    return info.used is not None and time.time() - info.used < within


async def ensure(store: Store, name: str, content: bytes | Path) -> bool:
    """Have content-addressed *name* in the store for some time to come; whether it was sent.

    A look at it costs less than its body. One of another size is none, and is written anew:
    a power cut has emptied it, or somebody else put it there. Cancelled: it is there whole or
    not at all.
    """
    there = await store.look(name)
    size = len(content) if isinstance(content, bytes) else content.stat().st_size  # noqa: ASYNC240
    if there is not None and there.size != size:
        await store.delete([name])
    elif there is not None and (is_fresh(there) or not await store.renew([name])):
        return False
    return await store.create(name, content, shared=True)
