"""Replicas by a service of Kubernetes: a server that answers as its API does, over TLS."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from banaserve_route.balancer.config import BalancerSettings, ReplicaSettings
from banaserve_route.balancer.discovery import Discovery
from banaserve_route.balancer.kubernetes import EndpointSlices
from certificates import write_certificate

TOKEN = "of-this-pod"


def server(*addresses: str, **conditions: bool | None) -> dict[str, object]:
    return {"addresses": list(addresses), "conditions": conditions, "nodeName": "n"}


class Api:
    """The API of Kubernetes: slices by namespace and service, and what was asked."""

    def __init__(self, account: Path) -> None:
        certificate, key = write_certificate(account)
        certificate.rename(account / "ca.crt")
        (account / "namespace").write_text("own\n")
        (account / "token").write_text(TOKEN + "\n")
        self.slices: dict[tuple[str, str], list[dict[str, object]]] = {}
        self.status = 200
        self.asked: list[str] = []
        self.tokens: list[str | None] = []
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                [label] = parse_qs(url.query)["labelSelector"]
                name = url.path.split("/")[5], label.removeprefix("kubernetes.io/service-name=")
                api.asked.append(url.path)
                api.tokens.append(self.headers["Authorization"])
                body = json.dumps({"kind": "EndpointSliceList", "items": api.slices.get(name, [])})
                self.send_response(api.status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *arguments: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(account / "ca.crt", key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.environment = {
            "KUBERNETES_SERVICE_HOST": "127.0.0.1",
            "KUBERNETES_SERVICE_PORT": str(self._server.server_port),
        }
        self.resolve = EndpointSlices(self.environment, account)
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Api]:
    made = Api(tmp_path)
    yield made
    made.close()


async def test_ready_servers_of_all_slices_are_found(api: Api) -> None:
    api.slices["llm", "vllm"] = [
        {
            "addressType": "IPv4",
            "endpoints": [
                server("10.0.0.2", ready=True),
                server("10.0.0.1", "10.0.9.1"),
                server("10.0.0.3", ready=False),
                server("10.0.0.4", ready=True, terminating=True),
                server("10.0.0.5", ready=None, terminating=None),
            ],
        },
        {"addressType": "IPv6", "endpoints": [server("fd00::1", ready=True), server()]},
        {"addressType": "FQDN", "endpoints": [server("a.example")]},
        {"addressType": "IPv4", "endpoints": None},
    ]
    found = ["10.0.0.1", "10.0.0.2", "10.0.0.5", "fd00::1"]
    assert await api.resolve("vllm.llm", 8000) == found
    assert await api.resolve("vllm.llm.svc.cluster.local", 8000) == found
    assert await api.resolve("vllm", 8000) == []
    assert [path.split("/")[5] for path in api.asked] == ["llm", "llm", "own"]
    assert set(api.tokens) == {f"Bearer {TOKEN}"}


async def test_a_pod_with_two_addresses_is_one_server(api: Api) -> None:
    def pod(name: str, address: str) -> dict[str, object]:
        return {**server(address), "targetRef": {"kind": "Pod", "name": name}}

    api.slices["llm", "vllm"] = [
        {"addressType": "IPv6", "endpoints": [pod("a", "fd00::1"), pod("c", "fd00::3")]},
        {"addressType": "IPv4", "endpoints": [pod("a", "10.0.0.1"), pod("b", "10.0.0.2")]},
    ]
    assert await api.resolve("vllm.llm", 8000) == ["10.0.0.1", "10.0.0.2", "fd00::3"]


async def test_the_balancer_follows_a_service(api: Api) -> None:
    api.slices["llm", "vllm"] = [{"addressType": "IPv4", "endpoints": [server("10.0.0.1")]}]
    given = BalancerSettings(replicas=(ReplicaSettings(url="k8s+http://vllm.llm:8000"),))
    given.check()
    said: list[str] = []
    discovery = Discovery(given, said.append, {"k8s": api.resolve})

    async def looked() -> list[str]:
        await discovery.look()
        return [one.url for one in discovery.settings.replicas]

    assert await looked() == ["http://10.0.0.1:8000"]
    for status, why in ((403, "let the service account list endpointslices"), (500, "looked up")):
        api.status = status
        assert await looked() == ["http://10.0.0.1:8000"]
        assert why in said[-1]
        api.status = 200
        assert await looked() == ["http://10.0.0.1:8000"]
    api.slices.clear()
    assert await looked() == []
    assert said[2:] == ["k8s+http://vllm.llm:8000 has no address"]


async def test_an_answer_that_is_none_of_the_api_changes_nothing(api: Api) -> None:
    api.slices["llm", "vllm"] = [{"addressType": "IPv4", "endpoints": "many"}]
    assert await api.resolve("vllm.llm", 8000) is None


async def test_a_server_with_another_certificate_gets_no_token(api: Api, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other, _ = write_certificate(tmp_path / "other", serial=2)
    other.rename(tmp_path / "ca.crt")
    assert await api.resolve("vllm.llm", 8000) is None
    assert api.tokens == []


async def test_outside_of_a_pod_the_reason_is_given_once(tmp_path: Path) -> None:
    given = BalancerSettings(replicas=(ReplicaSettings(url="k8s+http://vllm.llm:8000"),))
    said: list[str] = []
    discovery = Discovery(given, said.append, {"k8s": EndpointSlices({}, tmp_path)})
    assert [await discovery.look() for _ in range(2)] == [False, False]
    [line] = said
    assert "this is no pod of Kubernetes: KUBERNETES_SERVICE_HOST is not set" in line


async def test_a_pod_without_an_account_says_so(api: Api, tmp_path: Path) -> None:
    (tmp_path / "token").unlink()
    given = BalancerSettings(replicas=(ReplicaSettings(url="k8s+http://vllm.llm:8000"),))
    said: list[str] = []
    await Discovery(given, said.append, {"k8s": api.resolve}).look()
    [line] = said
    assert "the pod has no service account" in line
