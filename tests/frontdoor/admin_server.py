"""The admin API on a real port, for the commands that talk to it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import uvicorn

from waiting import until


class AdminServer:
    """Serves what ``opened()`` enters, in a thread with an event loop of its own."""

    url: str

    def __init__(self, opened: Callable[[], AbstractAsyncContextManager[Any]]) -> None:
        self._opened = opened
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self) -> None:
        async with self._opened() as app:
            config = uvicorn.Config(app, port=0, log_level="error", lifespan="off")
            self._server = uvicorn.Server(config)
            serving = asyncio.create_task(self._server.serve())
            await until(lambda: self._server.started)
            port = self._server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._started.set()
            await serving

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(60)
        assert not self._thread.is_alive()
