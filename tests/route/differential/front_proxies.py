"""Processes of nginx and HAProxy, each with two ways: to the balancer and to the origin."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from banaserve_bench.loadgen.servers import end_with_parent
from ports import free_port
from waiting import eventually

PACKAGES = {"nginx": "nginx-light", "haproxy": "haproxy"}
"""Programs, and the packages of Debian that have them."""

MAX_BODY_BYTES = 1_000
_START_S = 60.0

_NGINX = """
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log;
events {{ worker_connections 256; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    client_max_body_size {max_body_bytes};
    client_header_timeout 10s;
    client_body_timeout 10s;
    keepalive_requests 1000000;
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header X-Passed-On $request_id;
    upstream balancer {{ server 127.0.0.1:{balancer}; keepalive 1; keepalive_requests 1000000; }}
    upstream origin {{ server 127.0.0.1:{origin}; keepalive 1; keepalive_requests 1000000; }}
    server {{
        listen 127.0.0.1:{to_balancer};
        if ($server_protocol !~ "^HTTP/1") {{ return 444; }}
        location / {{ proxy_pass http://balancer; }}
    }}
    server {{
        listen 127.0.0.1:{to_origin};
        if ($server_protocol !~ "^HTTP/1") {{ return 444; }}
        location / {{ proxy_pass http://origin; }}
    }}
}}
"""

_HAPROXY = """
global
    nbthread 1
    maxconn 256
defaults
    mode http
    http-reuse always
    timeout connect 10s
    timeout client 3s
    timeout http-request 3s
    timeout server 60s
frontend to_balancer
    bind 127.0.0.1:{to_balancer}
    http-request set-header X-Passed-On %[uuid()]
    default_backend balancer
frontend to_origin
    bind 127.0.0.1:{to_origin}
    http-request set-header X-Passed-On %[uuid()]
    default_backend origin
backend balancer
    server balancer 127.0.0.1:{balancer}
backend origin
    server origin 127.0.0.1:{origin}
"""


@dataclass(frozen=True)
class FrontProxy:
    """Ports of one running proxy."""

    to_balancer: int
    to_origin: int


def missing() -> list[str]:
    """Packages to install."""
    return [package for program, package in PACKAGES.items() if _path_of(program) is None]


def start_nginx(folder: Path, balancer: int, origin: int, stack: ExitStack) -> FrontProxy:
    """Start nginx over a balancer's port and an origin's; it ends with ``stack``."""
    return _start(
        "nginx", _NGINX, folder, balancer, origin, stack,
        lambda program, file: [program, "-p", str(folder), "-c", str(file)],
    )  # fmt: skip


def start_haproxy(folder: Path, balancer: int, origin: int, stack: ExitStack) -> FrontProxy:
    """Start HAProxy in the same way."""
    return _start(
        "haproxy", _HAPROXY, folder, balancer, origin, stack,
        lambda program, file: [program, "-db", "-f", str(file)],
    )  # fmt: skip


def _start(
    name: str,
    config: str,
    folder: Path,
    balancer: int,
    origin: int,
    stack: ExitStack,
    command: Callable[[str, Path], list[str]],
) -> FrontProxy:
    program, file = _path_of(name), folder / f"{name}.conf"
    assert program is not None
    made = FrontProxy(free_port(), free_port())
    file.write_text(
        config.format(
            folder=folder,
            balancer=balancer,
            origin=origin,
            to_balancer=made.to_balancer,
            to_origin=made.to_origin,
            max_body_bytes=MAX_BODY_BYTES,
        )
    )
    with (folder / f"{name}.out").open("wb") as out:
        process = subprocess.Popen(
            command(program, file), stdout=out, stderr=out, preexec_fn=end_with_parent
        )
    stack.callback(process.wait)
    stack.callback(process.kill)
    for port in (made.to_balancer, made.to_origin):
        _wait_for(port, process, folder / f"{name}.out")
    return made


def _wait_for(port: int, process: subprocess.Popen[bytes], out: Path) -> None:
    def listens() -> bool:
        assert process.poll() is None, out.read_text()
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            return False
        return True

    eventually(listens, f"{process.args} listens at {port}", _START_S)


def _path_of(program: str) -> str | None:
    """``/usr/sbin``, where Debian puts both, is not on every user's path."""
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin")
