"""Call the REST APIs of Google Cloud with the application-default credentials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kinetic.aio._net.http import HttpClient, cut, json_object
from kinetic.aio._net.retry import Outage, RetryPolicy, retry
from kinetic.aio._net.tokens import Credentials, with_token


@dataclass(frozen=True, slots=True)
class GoogleRequest:
    """A GET request to one API: ``api`` is the first part of its host, such as ``compute``.

    ``query`` has pairs of names and values; a name may repeat.
    """

    api: str
    path: str
    query: tuple[tuple[str, str], ...] = ()


class GoogleClient:
    """Send requests to Google's APIs on one event loop; close it with `aclose`.

    ``CLOUDSDK_API_ENDPOINT_OVERRIDES_<API>`` in *environ* replaces the address of an API, as for
    gcloud. *policy* says how long to retry an API that doesn't answer.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        policy: RetryPolicy,
        *,
        connect_s: float = 10.0,
        idle_s: float = 60.0,
    ) -> None:
        self.credentials = Credentials()
        self._environ = environ
        self._policy = policy
        self._http = HttpClient(
            "the client of Google's APIs", connect_s=connect_s, idle_s=idle_s, trust_env=True
        )

    async def call(self, request: GoogleRequest) -> dict[str, Any]:
        """Send *request* and return the JSON object of the answer.

        Raises:
            HttpError: The API refuses the request.
            AuthError: There are no credentials, or Google refuses them.
            Unavailable: The API doesn't answer.
        """
        from yarl import URL

        server = self._server(request.api)
        url = URL(server + request.path, encoded=True).update_query(request.query)

        async def send(token: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            sent = self._http.session().get(url, headers=headers, allow_redirects=False)
            answer = await self._http.answered(sent)
            try:
                return json_object(await answer.text())
            finally:
                cut(answer)

        async def attempt() -> dict[str, Any]:
            with self._http.translated(f"can't call {request.api}", server):
                return await with_token(self.credentials, send)

        return await retry(attempt, self._policy, Outage(f"calling {request.api}"))

    async def aclose(self) -> None:
        """Close the connections; requests under way fail."""
        await self.credentials.aclose()
        await self._http.aclose()

    def _server(self, api: str) -> str:
        named = self._environ.get(f"CLOUDSDK_API_ENDPOINT_OVERRIDES_{api.upper()}")
        return (named or f"https://{api}.googleapis.com").rstrip("/")
