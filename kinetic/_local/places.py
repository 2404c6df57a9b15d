"""Where the local platform keeps what it has to remember."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kinetic._local.protocol import VERSION

__all__ = ["Places"]


@dataclass(frozen=True, slots=True)
class Places:
    """The files of one supervisor; the major version of the protocol is part of every path."""

    home: Path

    @property
    def state(self) -> Path:
        """The folder of everything below; private to the user."""
        return self.home / "local" / f"v{VERSION[0]}"

    @property
    def socket(self) -> Path:
        """Where the supervisor listens."""
        return self.state / "socket"

    @property
    def lock(self) -> Path:
        """Held by the supervisor as long as it lives."""
        return self.state / "lock"

    @property
    def starting(self) -> Path:
        """Held while a supervisor decides whether it is the one, or that it is no more."""
        return self.state / "starting"

    @property
    def journal(self) -> Path:
        """What has happened to the jobs."""
        return self.state / "journal"

    @property
    def diary(self) -> Path:
        """What the supervisor and the warm parents write to their standard error."""
        return self.state / "supervisor.log"

    @property
    def logs(self) -> Path:
        """One file a job."""
        return self.state / "logs"

    @property
    def work(self) -> Path:
        """One folder a running job."""
        return self.state / "work"

    @property
    def refuse(self) -> Path:
        """Folders of jobs that ended, until they are removed."""
        return self.state / "refuse"

    @property
    def cache(self) -> Path:
        """What jobs share: code that was unpacked, by digest."""
        return self.home / "cache"

    def log(self, name: str) -> Path:
        """The output of a job."""
        return self.logs / f"{name}.log"
