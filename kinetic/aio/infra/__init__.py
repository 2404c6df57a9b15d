"""Set up a site, which is a cluster on Google Cloud with all that its jobs need.

kinetic compares the wanted state with the existing one, plans changes, and applies the plan. It
stores no state of its own. `site` names resources; `setup` and `pools` describe the wanted state.
`apply` reads and changes resources, `plan` compares states without I/O, and `preflight` checks
requirements before the first write. `infrastructure` combines these modules, and `commands` offers
`kinetic up` and the related commands as coroutines.
`join` prepares an existing cluster. This package may import the adapters and `backends`, which
combines adapters.
"""

from kinetic.aio.infra.commands import (
    add_pool,
    down,
    list_pools,
    remove_pool,
    status,
    up,
    update_credentials,
)
from kinetic.aio.infra.controllers import Controller, read_controller
from kinetic.aio.infra.infrastructure import Infrastructure, Planned
from kinetic.aio.infra.join import Join, Joining, init, target_of
from kinetic.aio.infra.plan import Plan
from kinetic.aio.infra.pools import Pool
from kinetic.aio.infra.resources import Change
from kinetic.aio.infra.setup import check_parent
from kinetic.aio.infra.site import Site
from kinetic.aio.infra.status import NodePool, Part, Queue, Status, Work

__all__ = [
    "Change",
    "Controller",
    "Infrastructure",
    "Join",
    "Joining",
    "NodePool",
    "Part",
    "Plan",
    "Planned",
    "Pool",
    "Queue",
    "Site",
    "Status",
    "Work",
    "add_pool",
    "check_parent",
    "down",
    "init",
    "list_pools",
    "read_controller",
    "remove_pool",
    "status",
    "target_of",
    "up",
    "update_credentials",
]
