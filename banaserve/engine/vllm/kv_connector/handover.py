"""Note that the two legs of a request pass each other in vLLM's ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_KEY = "banaserve_handover"
_TO = "banaserve_push_to"


@dataclass(frozen=True, slots=True)
class Handover:
    """Facts of the other leg.

    Attributes:
        leaves_tail: This is a prefill leg: the partial last block is saved too, and blocks of
            the local prefix cache that the store lacks.
        push_to: This is a prefill leg whose decode leg runs on another machine: ``HOST:PORT`` of
            the store there, which gets the prompt's blocks while they are computed; empty for none.
        tokens: This is a decode leg: so many tokens lie in the store.
        is_stored: This leg comes without a prefill leg because the store has its prompt.
    """

    leaves_tail: bool = False
    push_to: str = ""
    tokens: int | None = None
    is_stored: bool = False

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None) -> Handover:
        """Read from a request's ``kv_transfer_params``; anything unknown means none."""
        params = kv_transfer_params or {}
        value = params.get(_KEY)
        if value == "prefill":
            to = params.get(_TO)
            return cls(leaves_tail=True, push_to=to if isinstance(to, str) else "")
        if value == "stored":
            return cls(is_stored=True)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(tokens=value)
        return cls()

    def to_params(self) -> dict[str, Any]:
        if self.leaves_tail:
            return {_KEY: "prefill", **({_TO: self.push_to} if self.push_to else {})}
        return {_KEY: "stored" if self.is_stored else self.tokens}
