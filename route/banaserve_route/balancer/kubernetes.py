"""Addresses of a service's servers from the API of Kubernetes, asked from within a pod.

EndpointSlices tell at once which servers are ready and which are about to end; the answers of DNS
are cached, and lack that.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from urllib.parse import quote

import msgspec

from banaserve.base.errors import UserError, one_line

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_HOST, _PORT = "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"
_ANSWER_S = 5.0
_MAX_ANSWER_BYTES = 16 << 20
_REFUSED = (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN)


class _Conditions(msgspec.Struct, frozen=True):
    """Conditions of a server; unknown is taken as ready, and as not terminating."""

    ready: bool | None = None
    terminating: bool | None = None


class _Pod(msgspec.Struct, frozen=True):
    name: str = ""


class _Server(msgspec.Struct, rename="camel"):
    addresses: list[str]
    conditions: _Conditions = _Conditions()
    target_ref: _Pod | None = None


class _Slice(msgspec.Struct, rename="camel"):
    address_type: str
    endpoints: list[_Server] | None = None


class _Slices(msgspec.Struct):
    items: list[_Slice]


_decode = msgspec.json.Decoder(_Slices).decode


class EndpointSlices:
    """Resolver of ``SERVICE.NAMESPACE``, or of ``SERVICE`` in the pod's own namespace.

    The pod's service account needs the right to list EndpointSlices of that namespace.

    Args:
        account: Folder with the token, the certificate authority and the namespace of the pod.
    """

    def __init__(
        self, environment: Mapping[str, str] = os.environ, account: Path = SERVICE_ACCOUNT
    ) -> None:
        self._environment, self._account = environment, account

    async def __call__(self, host: str, port: int) -> list[str] | None:
        """Return the addresses of the ready servers, sorted; None if the API cannot be reached.

        Raises:
            UserError: This process is not in a pod, or its account may not list EndpointSlices.
        """
        service, _, namespace = host.partition(".")
        namespace = namespace.split(".", 1)[0]  # as in SERVICE.NAMESPACE.svc.cluster.local
        return await asyncio.to_thread(self._addresses, service, namespace)

    def _addresses(self, service: str, namespace: str) -> list[str] | None:
        host, port = (self._environment.get(name, "") for name in (_HOST, _PORT))
        if not host or not port.isdecimal():
            raise UserError(f"this is no pod of Kubernetes: {_HOST} is not set")
        try:
            namespace = namespace or (self._account / "namespace").read_text().strip()
            # Read anew each time: Kubernetes replaces the token within the hour.
            token = (self._account / "token").read_text().strip()
            context = ssl.create_default_context(cafile=str(self._account / "ca.crt"))
        except OSError as error:
            raise UserError(f"the pod has no service account: {one_line(error)}") from None
        label = quote(f"kubernetes.io/service-name={service}", safe="")
        path = (
            f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices"
            f"?labelSelector={label}"
        )
        # No proxy and no redirect: neither may see the token.
        connection = HTTPSConnection(host, int(port), timeout=_ANSWER_S, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
            answer = connection.getresponse()
            if answer.status in _REFUSED:
                raise UserError(
                    f"the API of Kubernetes answers {answer.status}: let the service account list "
                    f"endpointslices of discovery.k8s.io in {namespace}"
                )
            if answer.status != HTTPStatus.OK:
                return None
            found = _decode(answer.read(_MAX_ANSWER_BYTES))
        except (OSError, HTTPException, msgspec.DecodeError):
            return None
        finally:
            connection.close()
        # With two stacks, each pod is in a slice of IPv4 and in one of IPv6: the former is last.
        return sorted(
            {
                (server.target_ref or _Pod()).name or server.addresses[0]: server.addresses[0]
                for family in ("IPv6", "IPv4")
                for one in found.items
                if one.address_type == family
                for server in one.endpoints or ()
                if server.addresses
                and server.conditions.ready is not False
                and not server.conditions.terminating
            }.values()
        )
