"""Infrastructure on Google Cloud: desired, observed, plan, apply. The cloud is the state.

`site` has names, `setup` and `pools` say what is wanted, `apply` observes and changes, `plan`
compares without I/O, `preflight` checks before the first write. `infrastructure` joins them, and
`commands` has the coroutines behind the commands. May import the adapters.
"""

from kinetic.aio.infra.commands import add_pool, down, list_pools, remove_pool, status, up
from kinetic.aio.infra.infrastructure import Infrastructure, Planned
from kinetic.aio.infra.plan import Plan
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Change
from kinetic.aio.infra.site import Site

__all__ = [
    "Change",
    "Infrastructure",
    "Plan",
    "Planned",
    "Pool",
    "Site",
    "add_pool",
    "down",
    "list_pools",
    "remove_pool",
    "status",
    "up",
]
