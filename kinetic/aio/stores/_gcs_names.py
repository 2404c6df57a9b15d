"""Where a store is in Cloud Storage: the runner's rule for names, with the client's errors."""

from __future__ import annotations

from typing import Self

from kinetic._runner.gcs_names import Place
from kinetic.errors import BackendError, ConfigurationError

__all__ = ["Location"]


class Location(Place):
    """A bucket, or a folder of one."""

    __slots__ = ()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """The place of ``gs://bucket`` or ``gs://bucket/folder``.

        Raises:
            ConfigurationError: It is no such URL.
        """
        try:
            return super().from_url(url)
        except ValueError as exc:
            raise ConfigurationError(f"{exc}, as in gs://my-project-jobs") from None

    def object_name(self, name: str) -> str:
        """What the object of *name*, or a prefix of names, is called in the bucket.

        Raises:
            BackendError: Cloud Storage allows no name of this length.
        """
        try:
            return super().object_name(name)
        except OSError as exc:
            raise BackendError(f"{exc}; use a shorter one") from None
