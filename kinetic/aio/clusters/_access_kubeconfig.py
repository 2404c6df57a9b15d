"""A context of the user's kubeconfig with its cluster and its user, as its files say."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kinetic._nearest import suggest
from kinetic._words import one_line
from kinetic.errors import ConfigurationError

if TYPE_CHECKING:
    from kubernetes_asyncio.config.kube_config import ConfigNode

__all__ = ["Context", "Section", "read_context"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """What a kubeconfig says of one cluster or user, and the folder its paths start from."""

    values: Mapping[str, Any] = field(repr=False)
    folder: Path

    def text(self, name: str) -> str:
        """A value that is text, or ""."""
        return str(self.values.get(name) or "")

    def pem(self, name: str) -> str | None:
        """Certificates or a key: there in base64, or in a file; None if neither.

        Raises:
            ValueError: The base64 is none, or the file cannot be read.
        """
        if encoded := self.text(f"{name}-data"):
            try:
                return base64.b64decode(encoded).decode()
            except ValueError as exc:
                raise ValueError(f"its {name}-data is not base64 of PEM") from exc
        if not (path := self.text(name)):
            return None
        try:
            return (self.folder / path).read_text()
        except OSError as exc:
            raise ValueError(f"its {name} cannot be read: {exc}") from exc


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One context; ``namespace`` is ``default`` where it names none."""

    name: str
    namespace: str
    cluster: Section
    user: Section

    @property
    def server(self) -> str:
        """The URL of the API server, without a slash at its end."""
        return self.cluster.text("server").rstrip("/")


def read_context(name: str, environ: Mapping[str, str]) -> Context:
    """The context *name* of the files in KUBECONFIG, else ``~/.kube/config``. Blocks.

    Raises:
        ConfigurationError: There is none, or the files are no kubeconfig.
    """
    # Here the client library does the merging. It takes 0.3 s to import.
    from kubernetes_asyncio.config.kube_config import ENV_KUBECONFIG_PATH_SEPARATOR as SEPARATOR
    from kubernetes_asyncio.config.kube_config import KubeConfigMerger

    named = environ.get("KUBECONFIG") or str(Path(environ.get("HOME") or "~") / ".kube" / "config")
    paths = [Path(one).expanduser() for one in named.split(SEPARATOR) if one]
    there = [str(one) for one in paths if one.is_file() and one.stat().st_size]
    if not there:
        raise ConfigurationError(
            f"KINETIC_KUBE_CONTEXT names the context {name!r}, and there is no kubeconfig at "
            f"{named}; set KUBECONFIG to one, or KINETIC_PROJECT and KINETIC_CLUSTER to a GKE "
            "cluster, which needs none"
        )
    try:
        return _found(cast("ConfigNode", KubeConfigMerger(SEPARATOR.join(there)).config), name)
    except ConfigurationError:
        raise
    except OSError as exc:
        raise ConfigurationError(f"the kubeconfig {exc.filename} cannot be read: {exc}") from exc
    except Exception as exc:  # what YAML and the library raise for what they did not expect
        words = f"{type(exc).__name__}: {one_line(str(exc))}"
        raise ConfigurationError(f"{named} is no kubeconfig ({words}); mend it") from exc


def _found(merged: ConfigNode, name: str) -> Context:
    context = _entry(merged, "contexts", name, "KINETIC_KUBE_CONTEXT").value["context"]
    whose = f"its context {name!r}"
    cluster = _section(merged, "clusters", "cluster", context["cluster"], whose)
    found = Context(
        name=name,
        namespace=context.get("namespace") or "default",
        cluster=cluster,
        user=_section(merged, "users", "user", context["user"], whose)
        if context.get("user")
        else Section(values={}, folder=cluster.folder),
    )
    if not found.server.startswith(("https://", "http://")):
        raise ConfigurationError(
            f"the cluster of the context {name!r} has no usable server: {found.server!r}; set it"
        )
    return found


def _section(merged: ConfigNode, kind: str, key: str, name: object, whose: str) -> Section:
    entry = _entry(merged, kind, str(name), whose)
    return Section(values=entry.value[key] or {}, folder=Path(entry.path or ".").absolute().parent)


def _entry(merged: ConfigNode, kind: str, name: str, whose: str) -> ConfigNode:
    entries: dict[str, ConfigNode] = {str(one.value["name"]): one for one in merged.value[kind]}
    if name not in entries:
        hint = suggest(name, entries, otherwise=f"there are {', '.join(sorted(entries)) or 'none'}")
        raise ConfigurationError(
            f"{whose} names {name!r}, which is none of the {kind} in the kubeconfig; {hint}"
        )
    return entries[name]
