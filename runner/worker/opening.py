"""Open a submission: what all its items share is prepared once, in the worker's I/O process.

It takes the steps of `kinetic._runner.job.attempt.Invocation` that don't depend on the item.
"""

from __future__ import annotations

import importlib
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..job import attempt, workspace
from ..job.opening import read_input
from ..protocol import wire
from ..protocol.outcomes import encode_error, error_text
from . import pull
from .kept_workspace import KeptWorkspace

if TYPE_CHECKING:
    from ..stores.objects import Objects


class Opened(NamedTuple):
    """What all items share: the pickles of the function and of ``init``, and the workspace.

    ``folder`` is the working directory of the items. ``kept`` is None if no item finds the
    workspace as it was submitted.
    """

    function: bytes
    init: bytes | None
    folder: str
    kept: KeptWorkspace | None


def open_submission(
    order: wire.Order,
    init: wire.Input | None,
    objects: Objects,
    place: workspace.JobPlace,
    *,
    restores: bool,
) -> Opened | pull.OpeningFailure:
    """Prepare what all items share, and leave the working directory of this process as it is.

    Args:
        order: The order of the submission.
        init: Where the pickle of ``init`` is.
        objects: The store.
        place: The directories of the worker.
        restores: Whether each item finds the workspace as it was submitted.
    """
    phase, own_folder = "environment setup", os.getcwd()
    try:
        attempt.check_python(order.client.get("python", ""))
        if order.requirements is not None:
            phase = "requirements"
            requirements: Any = importlib.import_module("..job.requirements", __package__)
            requirements.install(order.requirements, objects, os.fspath(place.work))
        phase, kept = "context extract", None
        if restores:
            kept = KeptWorkspace(order.code, objects, place)
        else:
            workspace.prepare(order.code, objects, place)
        phase, folder = "artifact download", os.getcwd()
        function = read_input(objects, order.function)
        init_bytes = None if init is None else read_input(objects, init)
        return Opened(function, init_bytes, folder, kept)
    except Exception as exc:
        if phase == "artifact download" and isinstance(exc, ValueError):
            phase = "artifact verification"
        return failure_of(exc, phase, place, "" if place.log is None else place.log())
    finally:
        os.chdir(own_folder)


def failure_of(
    exc: Exception, phase: str, place: workspace.JobPlace, log: str = ""
) -> pull.OpeningFailure:
    """Return the outcome of an item for which a worker couldn't prepare what items share.

    *log* has the last lines of the worker's output, if the platform doesn't keep them.
    """
    text = error_text(exc, phase=phase)
    advice = attempt.advice(exc, phase, place)
    message = f"kinetic {phase} failed: {text.qualname}: {text.message}"
    text = replace(text, message=f"{message}. {advice}" if advice else message, log=log)
    body = encode_error(text, None)
    now = time.time()
    outcome = wire.Outcome(
        wire.Kind.ERROR, "setup", phase=phase, started=now, ended=now, note=text.note
    )
    content = body.content if isinstance(body.content, bytes) else b""
    outcome = outcome._replace(body=body.digest)
    return pull.OpeningFailure(outcome, content, text.message, isinstance(exc, OSError))
