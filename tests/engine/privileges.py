"""Give up root's right to override the modes of files."""

from __future__ import annotations

import ctypes
import os


def without_privileges() -> None:
    """Make file modes apply to root too, in programs that this process starts from now on."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for capability in (1, 2) if os.geteuid() == 0 else ():  # CAP_DAC_OVERRIDE, _READ_SEARCH
        assert prctl(24, capability, 0, 0, 0) == 0  # PR_CAPBSET_DROP
