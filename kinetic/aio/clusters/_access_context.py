"""Access by a context of the user's kubeconfig, which is read, and read again, never written."""

from __future__ import annotations

import base64
import copy
import time
from collections.abc import Mapping
from typing import Any

import anyio.to_thread

from kinetic.aio.clusters._access import Access, Pass, proxy_for
from kinetic.aio.clusters._access_kubeconfig import Context, Section, read_context
from kinetic.aio.clusters._access_plugin import Plugin, Reply
from kinetic.aio.clusters._access_renewal import Fresh, OtherCluster, Renewal
from kinetic.aio.clusters._access_tls import Certificates, Contexts
from kinetic.errors import AuthError, ConfigurationError

__all__ = ["open_context"]

REREAD_S = 60.0
"""How often a file with a token is read again: whoever writes it does so before it ends."""

EARLY, LATE = 0.2, 0.05
"""Parts of a reply's life that are left when its plugin is run beside, and instead of, requests."""


async def open_context(name: str, environ: Mapping[str, str]) -> Access:
    """Access by the context *name* of the files in KUBECONFIG, else ``~/.kube/config``.

    They are read again when the credentials in them end, or are refused.

    Raises:
        ConfigurationError: There is no such context, or something in it is wrong.
        AuthError: Its credentials cannot be had.
    """
    first = await anyio.to_thread.run_sync(read_context, name, environ)
    proxy, headers = _proxy(first), _impersonation(first.user)
    passes = Renewal(_Source(first, environ).renew, f"the context {name!r}")
    await passes.first()
    return Access(
        server=first.server,
        name=f"the context {name!r}",
        passes=passes,
        namespace=first.namespace,
        tls_name=first.cluster.text("tls-server-name") or None,
        proxy=proxy,
        headers=headers,
    )


class _Source:
    """Gets passes of one context, for the server that it named first and for no other."""

    def __init__(self, first: Context, environ: Mapping[str, str]) -> None:
        self._first = first
        self._environ = environ
        self._contexts = Contexts()
        self._provider = _Provider()

    async def renew(self) -> Fresh:
        first, asked = self._first, time.time()
        context = await anyio.to_thread.run_sync(read_context, first.name, self._environ)
        if context.server != first.server:
            raise OtherCluster(
                f"the context {context.name!r} names the server {context.server} now, and this "
                f"client was opened for {first.server}; open another"
            )
        reply: Reply | None = None
        header = ""
        if context.user.values.get("exec"):
            reply = await self._plugin(context)
        elif section := context.user.values.get("auth-provider"):
            header = await self._provider.header(section, context.name)
        shown = await anyio.to_thread.run_sync(self._pass, context, reply, header)
        if reply is not None and reply.until is not None:
            life, until = reply.until - asked, reply.until
            return Fresh(shown=shown, early=until - EARLY * life, late=until - LATE * life)
        if context.user.text("tokenFile") or header:
            return Fresh(shown=shown, early=asked + REREAD_S)
        return Fresh(shown=shown)

    async def _plugin(self, context: Context) -> Reply:
        told = await anyio.to_thread.run_sync(_told, context)
        return await Plugin(
            section=context.user.values["exec"],
            folder=context.user.folder,
            cluster=told,
            environ=self._environ,
        ).run()

    def _pass(self, context: Context, reply: Reply | None, provided: str) -> Pass:
        try:
            header = provided or _header(context.user, reply)
            if not context.server.startswith("https:"):
                return Pass(authorization=header)
            tls = self._contexts.context(_certificates(context, reply))
        except (OSError, ValueError) as exc:
            raise ConfigurationError(
                f"the context {context.name!r} cannot be used: {exc}; mend the kubeconfig"
            ) from exc
        return Pass(authorization=header, tls=tls)


class _Provider:
    """Tokens of an ``auth-provider``, which only the client library still knows.

    It keeps what it was given when it renewed a token, so it is asked again, not made again.
    """

    def __init__(self) -> None:
        self._section: Any = None
        self._loader: Any = None  # a KubeConfigLoader, whose methods have no types

    async def header(self, section: Mapping[str, Any], name: str) -> str:
        from kubernetes_asyncio.client import Configuration
        from kubernetes_asyncio.config.kube_config import KubeConfigLoader

        if self._loader is None or self._section != section:
            self._section = section
            self._loader = KubeConfigLoader(
                {
                    "contexts": [{"name": name, "context": {"cluster": "c", "user": "u"}}],
                    "clusters": [{"name": "c", "cluster": {"server": "http://"}}],
                    "users": [{"name": "u", "user": {"auth-provider": copy.deepcopy(section)}}],
                },
                active_context=name,
            )
        configuration: Any = Configuration()
        try:
            await self._loader.load_and_set(configuration)
        except Exception as exc:  # it has no error of its own for most of what can happen
            self._loader = None
            raise AuthError(
                f"the auth-provider of the context {name!r} gave no token: {exc!r}; log in "
                "again, or use a credential plugin (exec) instead"
            ) from exc
        return str(configuration.api_key.get("BearerToken") or "")


def _header(user: Section, reply: Reply | None) -> str:
    token = reply.token if reply else user.text("token")
    if (named := user.text("tokenFile")) and reply is None:
        token = (user.folder / named).read_text().strip() or token
    if token:
        return f"Bearer {token}"
    if name := user.text("username"):
        basic = f"{name}:{user.text('password')}"
        return f"Basic {base64.b64encode(basic.encode()).decode()}"
    return ""


def _certificates(context: Context, reply: Reply | None) -> Certificates:
    certificate, key = context.user.pem("client-certificate"), context.user.pem("client-key")
    if reply is not None and reply.certificate:
        certificate, key = reply.certificate, reply.key
    return Certificates(
        ca=context.cluster.pem("certificate-authority"),
        verify=not context.cluster.values.get("insecure-skip-tls-verify"),
        certificate=certificate,
        key=key,
    )


def _told(context: Context) -> dict[str, Any]:
    """What a plugin with ``provideClusterInfo`` learns of the cluster."""
    values = context.cluster.values
    known = ("server", "tls-server-name", "insecure-skip-tls-verify", "proxy-url")
    told: dict[str, Any] = {name: values[name] for name in known if name in values}
    try:
        ca = context.cluster.pem("certificate-authority")
    except ValueError:
        ca = None  # told when it is needed
    if ca:
        told["certificate-authority-data"] = base64.b64encode(ca.encode()).decode()
    for extension in values.get("extensions") or ():
        if extension.get("name") == "client.authentication.k8s.io/exec":
            told["config"] = extension.get("extension")
    return told


def _proxy(context: Context) -> str | None:
    named = context.cluster.text("proxy-url")
    if named and not named.startswith(("http://", "https://")):
        raise ConfigurationError(
            f"the context {context.name!r} wants the proxy {named}; kinetic can use http and "
            "https proxies only"
        )
    return named or proxy_for(context.server)


def _impersonation(user: Section) -> tuple[tuple[str, str], ...]:
    """The headers of those who act as somebody else."""
    headers = [("Impersonate-User", user.text("as")), ("Impersonate-Uid", user.text("as-uid"))]
    headers += [("Impersonate-Group", str(one)) for one in user.values.get("as-groups") or ()]
    extra: Mapping[str, list[str]] = user.values.get("as-user-extra") or {}
    for key, values in extra.items():
        headers += [(f"Impersonate-Extra-{key}", one) for one in values]
    return tuple((key, value) for key, value in headers if value)
