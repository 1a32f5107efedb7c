"""Our sections of vLLM's ``additional_config``, which goes to engines unread."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from banaserve.errors import UserError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")


def section(config: VllmConfig, key: str, kind: type[T]) -> T | None:
    """The section ``key`` as a ``kind``; None where there is none.

    Raises:
        UserError: It is malformed.
    """
    extra = config.additional_config
    given = extra.get(key) if isinstance(extra, dict) else None
    if given is None:
        return None
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as wrong:
        raise UserError(f"{key}: {wrong}") from wrong
