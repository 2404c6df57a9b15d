"""An item that several hosts run at once, on the first of them."""

from __future__ import annotations

from typing import Any

from ..job.attempt import Invocation
from ..job.hosts import HostCall, Watch
from ..protocol import wire
from ..protocol.spool import Spooled
from .item import ItemInvocation


class HostItem(HostCall, ItemInvocation):
    """The call of an item on the first host."""

    def run(self) -> tuple[wire.Outcome, Spooled]:
        """Make the call; see `HostCall.run`."""
        assert self.context.hosts is not None
        self.hosts = self.context.hosts
        self.watch = Watch(self.order, self.context.objects)
        return super().run()

    def _encode_value(self, value: Any) -> tuple[wire.Outcome, Spooled]:
        # The other hosts may still fail, so the I/O process can't encode the value yet.
        return Invocation._encode_value(self, value)
