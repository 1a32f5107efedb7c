"""Digests of images: how registries are asked for them, and that a release is built on them."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.room

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def pin_images() -> Any:
    spec = importlib.util.spec_from_file_location("pin_images", DOCKER / "pin_images.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


PINS = pin_images()
DIGEST = "sha256:" + "ab" * 32
FILE = """FROM python:3.11-slim AS build
COPY --from=build /a /a
FROM build
    image: prom/prometheus:v3@sha256:stale
    image: banaserve:${DEVICE:-cpu}
"""


class Registry(BaseHTTPRequestHandler):
    """Knows one image, and tells its digest to whoever shows the token that it gives."""

    def do_GET(self) -> None:
        assert "scope=repository%3Alibrary%2Fpython%3Apull" in self.path
        body = json.dumps({"token": "anyone"}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self) -> None:
        url = f"http://{self.headers['Host']}/token"
        if self.headers.get("Authorization") != "Bearer anyone":
            self.send_response(401)
            scope = "repository:library/python:pull"
            self.send_header(
                "WWW-Authenticate", f'Bearer realm="{url}",service="r",scope="{scope}"'
            )
        elif self.path == "/v2/library/python/manifests/3.11":
            self.send_response(200)
            self.send_header("Docker-Content-Digest", DIGEST)
        else:
            self.send_response(404)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_a_registry_is_asked_for_digests():
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()

        def at(image: str) -> Any:
            return PINS.place_of(image)._replace(registry=f"http://127.0.0.1:{server.server_port}")

        assert PINS.digest_of("python:3.11", at) == DIGEST
        with pytest.raises(PINS.NoDigestError, match=r"python:4: .* 404"):
            PINS.digest_of("python:4", at)
        server.shutdown()
    with pytest.raises(PINS.NoDigestError, match="does not tell its digest"):
        PINS.digest_of("python:3.11", at)


@pytest.mark.parametrize(
    ("image", "registry", "repository", "tag"),
    [
        ("python:3.11", "registry-1.docker.io", "library/python", "3.11"),
        ("python", "registry-1.docker.io", "library/python", "latest"),
        ("nvidia/cuda:13", "registry-1.docker.io", "nvidia/cuda", "13"),
        ("quay.io/a/b:1", "quay.io", "a/b", "1"),
        ("localhost:5000/a", "localhost:5000", "a", "latest"),
    ],
)
def test_short_names_of_images_are_read_as_docker_does(image, registry, repository, tag):
    assert PINS.place_of(image) == (f"https://{registry}", repository, tag)


def test_every_image_of_others_gets_its_digest_and_nothing_else_changes():
    assert PINS.unpinned(FILE) == ["python:3.11-slim", "prom/prometheus:v3"]
    done = PINS.pinned(FILE, lambda _: DIGEST)
    assert PINS.unpinned(done) == []
    assert done.replace(f"@{DIGEST}", "") == FILE.replace("@sha256:stale", "")
    assert PINS.pinned(done, lambda _: DIGEST) == done
    for name in PINS.NAMES:
        text = (DOCKER / name).read_text()
        assert PINS.unpinned(PINS.pinned(text, lambda _: DIGEST)) == []


def test_a_release_is_not_built_on_images_without_digests(tmp_path):
    for name in ("docker", "requirements"):
        shutil.copytree(ROOT / name, tmp_path / name)
    cuda = tmp_path / "docker" / "Dockerfile.cuda"
    cuda.write_text(cuda.read_text() + "\nFROM evil:latest\n")

    def build(release: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(tmp_path / "docker" / "build.sh"), "cpu", "/dev/null/nowhere"]
        env = {**os.environ, "RELEASE": release}
        return subprocess.run(command, env=env, capture_output=True, text=True)

    refused = build("1")
    assert refused.returncode == 1
    assert "Dockerfile.cuda: evil:latest has no digest: `make pin-images`" in refused.stderr
    assert "no digest" not in build("").stderr  # it goes on, to a folder that cannot be
    for name in PINS.NAMES:
        path = tmp_path / "docker" / name
        path.write_text(PINS.pinned(path.read_text(), lambda _: DIGEST))
    assert "no digest" not in build("1").stderr
