"""Run the jobs of the cluster contract as pods."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from kinetic.aio.ports import Image, JobSpec, Resources
from tests.contract import cluster
from tests.kubernetes import places
from tests.orders import facts_of, order_of

PROGRAM = """
import json, os, signal, sys
import time
order = json.loads(json.loads(os.environ["KINETIC_ORDER"])["client"]["facts"])
signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
def late(*_):
    header = json.dumps({"kind": "error", "reason": "deadline"})
    receipt = {"kinetic": 2, "index": 0, "attempt": 1, "header": header, "mac": ""}
    with open(os.environ["KINETIC_TERMINATION_LOG"], "w") as file:
        json.dump(receipt, file)
    os._exit(43)
signal.signal(signal.SIGALRM, late)
signal.setitimer(signal.ITIMER_REAL, order.get("timeout", 0), 0.5)
if order["lines"]:
    print(*order["lines"], sep="\\n", flush=True)
else:
    print(flush=True)
if order["gate"]:
    os.open(order["gate"], os.O_RDONLY)
print("last", flush=True)
print(os.environ["KINETIC_POD_UID"], flush=True)
sys.exit(order["code"])
"""
"""What the pods run in place of kinetic's runner."""


class Place(cluster.Place):
    """Make the contract's jobs pods; two fit on the node at once."""

    def job(self, name: str, **more: Any) -> JobSpec:
        job = super().job(name, **more)
        program = self.folder / "job.py"
        if not program.exists():  # write it once: pods of earlier jobs may be reading it
            program.write_text(PROGRAM)
        return replace(
            job,
            image=Image(uri=places.IMAGE, command=(sys.executable, str(program))),
            order=order_of(facts_of(job.order) | {"timeout": job.timeout or 0}),
            resources=Resources(cpu=7),
        )
