"""Memory that is shared with others, locked for this process's GPU: copies run on their own then.

Of the store's pool, and of the pages in which KV lands.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

import numpy.typing as npt
import torch

from banaserve.kvstore.sizes import format_size

logger = logging.getLogger(__name__)
_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""


class View(Protocol):
    """Shared memory as this process sees it.

    Attributes:
        base_address: Of its first byte.
        memory: Its bytes.
    """

    @property
    def base_address(self) -> int: ...

    @property
    def memory(self) -> npt.NDArray[Any]: ...


class PinnedPool:
    """One view of the pool at a time; may be called from several threads.

    Pages must not be unmapped while they are registered: CUDA would go on using them for whatever
    is mapped there next. So the view is kept until ``release``.

    Args:
        gpu: Whose copies use the pool.
        wait_for_copies: Returns when no copy that was queued before touches the pool any more.
    """

    def __init__(self, gpu: torch.device, wait_for_copies: Callable[[], None]) -> None:
        self._gpu = gpu
        self._wait_for_copies = wait_for_copies
        self._lock = threading.Lock()
        self._view: View | None = None
        self._is_ours = self._is_pinned = False

    def pin(self, view: View) -> bool:
        """Whether ``view`` is pinned. Another view is released first, and forgotten.

        A view that cannot be pinned is told of in the log, once, and not tried again.
        """
        with self._lock:
            if self._view is not view:
                self._release()
                self._view = view
                self._register(view)
            return self._is_pinned

    def release(self) -> None:
        """Let go of the view, once no copy touches it."""
        with self._lock:
            self._release()

    def _register(self, view: View) -> None:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(view.base_address, view.memory.size, 0))
        self._is_ours = not code
        self._is_pinned = code in (0, _ALREADY_REGISTERED)
        if code:
            self._take_error()
        if not self._is_pinned:
            logger.warning(
                "%s of shared memory cannot be pinned (CUDA error %d), so copies are slower: look "
                "at ulimit -l, or make the store's pool smaller",
                format_size(view.memory.size),
                code,
            )

    def _release(self) -> None:
        if self._view is not None and self._is_ours:
            self._wait_for_copies()
            code = int(torch.cuda.cudart().cudaHostUnregister(self._view.base_address))
            if code:
                self._take_error()
                logger.warning("shared memory cannot be unpinned (CUDA error %d)", code)
        self._view, self._is_ours, self._is_pinned = None, False, False

    def _take_error(self) -> None:
        """CUDA reports a failure once more, as that of this thread's next launch."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._gpu)
