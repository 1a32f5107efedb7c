"""Note that the two legs of a request pass each other in vLLM's ``kv_transfer_params``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from banaserve.kvstore.wire import MAX_READERS, Address, KeepSeconds

_KEY = "banaserve_handover"


class Handover(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Facts that a leg is told about the other legs of its request.

    Attributes:
        leaves_tail: True for a prefill leg: the partial last block is saved too, and blocks of
            the local prefix cache that the store lacks.
        push_to: Store that gets the prompt's blocks while a prefill leg computes them, as
            ``HOST:PORT``: that of the decode leg, if on another machine; empty for none.
        tokens: Number of tokens in the store that a prefill leg left for this decode leg; None for
            other legs.
        hold: Number under which the store keeps the prompt's blocks from the prefill leg on until
            the decode legs have read them; 0 for none.
        num_readers: Number of decode legs that read the blocks of this prefill leg.
        reader: Index of this decode leg among the readers, from 0 on.
        pushed_from: Store on the machine of this decode leg's prefill leg, as ``HOST:PORT``, if it
            is another machine; that store keeps the blocks too. Empty for none.
        is_stored: True for a leg without a prefill leg, because the store has its prompt.
        keep_s: Time for which the request asks to keep its blocks, in seconds; 0 if it does not.
    """

    leaves_tail: bool = False
    push_to: Address = ""
    tokens: Annotated[int, msgspec.Meta(gt=0)] | None = None
    is_stored: bool = False
    hold: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 0
    num_readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1
    reader: Annotated[int, msgspec.Meta(ge=0, lt=MAX_READERS)] = 0
    pushed_from: Address = ""
    keep_s: KeepSeconds = 0.0

    @classmethod
    def of(cls, kv_transfer_params: Mapping[str, Any] | None) -> Handover:
        """Read a request's ``kv_transfer_params``; anything unknown counts as no handover."""
        try:
            return msgspec.convert((kv_transfer_params or {}).get(_KEY, {}), cls)
        except msgspec.ValidationError:
            return cls()

    def to_params(self) -> dict[str, Any]:
        """Return ``kv_transfer_params`` with this handover."""
        return {_KEY: msgspec.to_builtins(self)}
