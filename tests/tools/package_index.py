"""Package index on loopback with wheels made for one test, which can fail as networks do."""

from __future__ import annotations

import base64
import hashlib
import io
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote


@dataclass
class PackageIndex:
    """Files by name; the next answers with those in ``cut`` or ``damaged`` go wrong.

    Attributes:
        cut: Files whose connection closes in the middle.
        damaged: Files of which a byte is another.
        changed: What arrives instead of a file.
        hidden: Files that pages do not show.
    """

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    damaged: set[str] = field(default_factory=set)
    changed: dict[str, bytes] = field(default_factory=dict)
    hidden: set[str] = field(default_factory=set)
    asked: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        version: str,
        modules: Mapping[str, str | bytes],
        requires: tuple[str, ...] = (),
    ) -> str:
        """Add a wheel; returns its line of a lock."""
        data = wheel(name, version, modules, requires)
        self.files[f"{name.replace('-', '_')}-{version}-py3-none-any.whl"] = data
        return f"{name}=={version} \\\n    --hash=sha256:{hashlib.sha256(data).hexdigest()}\n"

    def add_installed(self, name: str) -> str:
        """Add a package of pure Python of this environment as it is."""
        found = distribution(name)
        paths = [p for p in found.files or () if p.suffix != ".pyc" and ".." not in p.parts]
        here = [p for p in paths if ".dist-info" not in str(p) and Path(p.locate()).is_file()]
        modules = {str(path): Path(path.locate()).read_bytes() for path in here}
        return self.add(name, found.version, modules)

    def page(self, name: str) -> str:
        """Links of one package; relative, with the hash of what they should give."""
        links = [
            f'<a href="/files/{file}#sha256={hashlib.sha256(data).hexdigest()}">{file}</a>'
            for file, data in self.files.items()
            if file.startswith(f"{name.replace('-', '_')}-") and file not in self.hidden
        ]
        return f"<!DOCTYPE html><html><body>{''.join(links)}</body></html>" if links else ""


def wheel(
    name: str, version: str, modules: Mapping[str, str | bytes], requires: tuple[str, ...] = ()
) -> bytes:
    """A wheel that holds ``modules``: sources by path."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    head = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    members: dict[str, str | bytes] = dict(modules)
    members[f"{info}/METADATA"] = head + "".join(f"Requires-Dist: {one}\n" for one in requires)
    tag = "Tag: py3-none-any\n"
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\n{tag}"
    record = ""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path, text in members.items():
            data = text.encode() if isinstance(text, str) else text
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o100755 << 16  # programs are in some
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record += f"{path},sha256={digest},{len(data)}\n"
        archive.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return packed.getvalue()


@contextmanager
def serving() -> Iterator[PackageIndex]:
    """An empty index that answers until the block ends."""
    index = PackageIndex()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            index.asked.append(self.path)
            folder, _, name = unquote(self.path).strip("/").partition("/")
            page = index.page(name.strip("/")) if folder == "simple" else ""
            if page:
                self._send(page.encode(), "text/html")
            elif folder == "files" and name in index.files:
                self._send_file(name)
            else:
                self.send_error(404)

        def _send_file(self, name: str) -> None:
            data = index.changed.get(name, index.files[name])
            if name in index.damaged:
                data = data[:60] + bytes([data[60] ^ 1]) + data[61:]
            self._send(data, "application/zip", len(data) // 2 if name in index.cut else len(data))

        def _send(self, data: bytes, kind: str, sent: int | None = None) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[:sent])
            if sent is not None and sent < len(data):
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple/"
    try:
        yield index
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
