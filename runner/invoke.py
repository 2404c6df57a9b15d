"""Prepare the place, rebuild the call, make it, and say how it went."""

from __future__ import annotations

import errno
import importlib
import os
import pickle
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING, Any

from . import frames, opening, pickles, private, results, views, workspace
from .stopping import Stopped, Stopping, running_seconds
from .wire import Assignment, Input, Kind, Outcome, value_key

if TYPE_CHECKING:
    from .objects import Objects

__all__ = ["Invocation"]

SMALL = 64 * 1024

RESERVE = 4 << 20
"""Bytes that are kept back for a job which fails because it has taken all the others."""


class Invocation:
    """One call of the user's function, with the phase it is in."""

    def __init__(
        self,
        order: Assignment,
        objects: Objects,
        site: workspace.Site,
        stopping: Stopping,
        executor: str,
    ) -> None:
        self._order = order
        self._objects = objects
        self._site = site
        self._stopping = stopping
        self._executor = executor
        self._phase = "startup"
        self._started = time.time()
        self._begun: tuple[bytes | None, bytes] | None = None
        self._reserve = b""

    def begun(self, function: bytes | None, arguments: bytes) -> None:
        """`opening` has made the folders and checked *arguments*, the parent *function*."""
        self._begun = (function, arguments)

    def run(self) -> tuple[Outcome, results.Stored]:
        """The outcome and its body. Never raises but for `Stopped`'s kind of trouble in itself."""
        self._reserve = _reserve()
        try:
            with self._stopping.interruptible():
                function, args, kwargs = self._prepare()
                if self._order.debug_s is not None:
                    self._debug()
                value = self._call(function, args, kwargs)
            return self._encoded(value)
        except Stopped as stopped:
            self._reserve = b""
            return self._stopped(stopped)
        except BaseException as error:
            self._reserve = b""
            return self._failed(error)

    def _prepare(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        order = self._order
        if self._begun is not None:
            self._phase = "context extract"
            self._enter()
            _prefer_jax()
            known, arguments = self._begun
            content = known if known is not None else self._content(order.function)
            self._phase = "payload unpickle"
            function = self._load(content)
            args, kwargs = self._load(arguments)
            return function, args, kwargs
        with self._in_phase("environment setup"):
            _check_python(order.client.get("python", ""))
            if order.output_dir.startswith("/"):
                private.make_folder(order.output_dir)
        if order.requirements is not None:
            with self._in_phase("requirements"):
                _install(order.requirements, self._objects, self._site)
        with self._in_phase("data resolve"):
            views.prepare(order.data, self._objects, self._site)
        with self._in_phase("context extract"):
            workspace.prepare(order.code, self._objects, self._site)
        _prefer_jax()
        self._join()
        with self._in_phase("artifact download"):
            function_bytes = self._content(order.function)
            arguments_bytes = self._content(order.arguments)
        with self._in_phase("payload unpickle"):
            function = self._load(function_bytes)
            args, kwargs = self._load(arguments_bytes)
        return function, args, kwargs

    def _join(self) -> None:
        """Where several hosts run one call: find the others, before anything is loaded."""

    def _enter(self) -> None:
        workspace.enter(self._order.code, self._site)

    def _load(self, content: bytes) -> Any:
        if self._order.debug_s is None:
            return _load(content)
        return _debugger().load(content, self._order, self._site)

    def _debug(self) -> None:
        """Let a person attach a debugger, and wait for that."""
        self._phase = "debugger setup"
        host, hosts = self._place()
        waiting = _debugger().Waiting(self._order, self._objects, self._site, host, hosts)
        waiting.begin()
        self._phase = "waiting for a debugger"
        waiting.wait()

    def _place(self) -> tuple[int, int]:
        """Which of how many hosts this is."""
        return 0, 1

    def _content(self, part: Input) -> bytes:
        self._phase = "artifact download"
        try:
            return opening.content(self._objects, part)
        except ValueError:
            self._phase = "artifact verification"
            raise

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._phase = "execute"
        try:
            value = function(*args, **kwargs)
            if hasattr(value, "__await__"):
                import asyncio  # a warm parent without it makes cheaper forks

                value = asyncio.run(_awaited(value))
        except SystemExit as leaving:
            if leaving.code in (None, 0):
                return None
            raise
        return value

    def _encoded(self, value: Any) -> tuple[Outcome, results.Stored]:
        self._phase = "result serialization"
        spool = f"{self._site.work}/result"
        try:
            stored = results.encode_value(value, spool)
        except BaseException as error:
            self._reserve = b""
            text = results.error_text(error, phase=self._phase, own_frames=1)
            words = f"the result cannot be pickled: {text.qualname}: {text.message}"
            text = replace(text, message=words, result_repr=results.result_repr(value))
            outcome = self._outcome(Kind.ERROR, reason=_reason(error, self._phase))
            return outcome, results.encode_error(text, None)
        outcome = self._outcome(Kind.VALUE)
        if not isinstance(stored.content, bytes):
            order = self._order
            name = value_key(order.scope, order.index, order.attempt, self._executor)
            outcome = outcome._replace(value=(name, stored.digest))
        return outcome, stored

    def _failed(self, error: BaseException) -> tuple[Outcome, results.Stored]:
        if self._phase == "execute":
            text = results.error_text(error, phase=self._phase, own_frames=_own_frames(error))
            with suppress(Exception):  # the log is the user's, who may have closed it
                sys.stderr.write(text.traceback)
        else:
            text = results.error_text(error, phase=self._phase)
            words = f"kinetic {self._phase} failed: {text.qualname}: {text.message}"
            text = replace(text, message=words + _hint(error, self._phase, self._site))
        text = self._worded(text)
        rebuilt = error if self._phase == "execute" and not _leaving(error) else None
        outcome = self._outcome(Kind.ERROR, reason=_reason(error, self._phase))
        return outcome, results.encode_error(text, rebuilt)

    def _stopped(self, stopped: Stopped) -> tuple[Outcome, results.Stored]:
        limit = self._order.timeout
        late = limit is not None and (self._stopping.out_of_time or running_seconds() >= limit)
        reason = "deadline" if late else "preempted"
        words = f"ran longer than its timeout of {limit:g} s" if late else "was asked to stop"
        text = results.error_text(stopped, phase=self._phase, own_frames=2)
        text = replace(text, qualname="", message=f"the job {words}")
        return self._outcome(Kind.ERROR, reason=reason), results.encode_error(text, None)

    def _worded(self, text: results.ErrorText) -> results.ErrorText:
        """As it is told: with the last lines of the log, where these would be gone."""
        log = self._site.log
        return text if log is None else replace(text, log=log())

    def _outcome(self, kind: Kind, *, reason: str = "") -> Outcome:
        return Outcome(
            kind=kind,
            reason=reason,
            executor=self._executor,
            fence=self._order.fence,
            phase=self._phase,
            started=self._started,
            ended=time.time(),
        )

    @contextmanager
    def _in_phase(self, phase: str) -> Generator[None]:
        self._phase = phase
        yield


def _reserve() -> bytes:
    """Memory that is not touched, and so costs none before it is given back."""
    try:
        return bytes(RESERVE)
    except MemoryError:
        return b""


def _load(content: bytes) -> Any:
    """The value of a container; a small one that knows nothing of ours by the shortest way."""
    if len(content) < SMALL and b"kinetic" not in content:
        found = frames.unpack(content).frames
        if len(found) == 1:
            return pickle.loads(found[0])
    return pickles.load(content)


async def _awaited(value: Any) -> Any:
    return await value


def _own_frames(error: BaseException) -> int:
    """How many frames are outside of the user's: ours, and between them those of asyncio."""
    count = own = 0
    trace = error.__traceback__
    while trace is not None:
        count += 1
        if trace.tb_frame.f_globals is globals():
            own = count
        trace = trace.tb_next
    return own


def _leaving(error: BaseException) -> bool:
    """Exceptions that must not be raised in the caller's process as themselves."""
    return isinstance(error, (SystemExit, KeyboardInterrupt, GeneratorExit))


def _reason(error: BaseException, phase: str) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    return "user error" if phase in ("execute", "result serialization") else "setup"


def _check_python(submitted: str) -> None:
    """Refuse before anything is unpickled: bytecode does not cross minor versions."""
    here = ".".join(map(str, sys.version_info[:3]))
    if submitted and submitted.split(".")[:2] != here.split(".")[:2]:
        raise RuntimeError(
            f"the job was submitted from Python {submitted} and runs on Python {here}; "
            "use an image (or interpreter) with the same minor version"
        )


def _prefer_jax() -> None:
    """Have Keras use JAX where it is, as in a pod: nothing else is expected to be installed."""
    if "KERAS_BACKEND" not in os.environ and PathFinder.find_spec("jax") is not None:
        os.environ["KERAS_BACKEND"] = "jax"


def _install(part: Input, objects: Objects, site: workspace.Site) -> None:
    """Install what the project needs, before anything of it is imported."""
    requirements: Any = importlib.import_module(f"{__package__}.requirements")
    requirements.install(part, objects, os.fspath(site.work))


def _debugger() -> Any:
    return importlib.import_module(f"{__package__}.debugger")


def _hint(error: BaseException, phase: str, site: workspace.Site) -> str:
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f". The disk of {site.cache} is full: free some space there"
    if phase == "payload unpickle" and isinstance(error, ModuleNotFoundError):
        advice = site.getting("it")
        return f". The module {error.name!r} is not installed where the job runs: {advice}"
    return ""
