"""The version of this package; a leaf, so that any module can name it."""

from __future__ import annotations

__version__ = "0.1.0"
