"""LoRA adapters as engines know them: a reloaded adapter shares no KV with its earlier version."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from banaserve.engine.compat.requests import LoRARequest
from banaserve.engine.connector.block_hash import describe_adapter


class Adapters:
    """Adapters, with a unique id and name for each load of an adapter.

    vLLM puts the name and path of an adapter into the keys of its KV blocks; of two adapters with
    the same name in a batch it activates only one. Replaced files have the same path as before.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._names: dict[int, str] = {}

    def begin(self, adapter: LoRARequest) -> None:
        """Give an id to an adapter that engines are about to load; modifies ``adapter``.

        An adapter loaded in place of another one gets a new id, too, since running requests
        continue with the old weights.
        """
        adapter.lora_int_id, adapter.load_inplace = next(self._ids), False

    async def loaded(self, adapter: LoRARequest) -> None:
        """Name an adapter by the hash of its files, which identifies them after a restart, too.

        Raises:
            OSError: A file of the adapter cannot be read.
        """
        digest = await asyncio.to_thread(describe_adapter, adapter.lora_path)
        name = f"{adapter.lora_name}@{adapter.lora_int_id}.{digest[:16]}"
        self._names[adapter.lora_int_id] = name

    def resolve_lora(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return options of ``generate`` or ``encode`` with the adapter as engines know it."""
        adapter = options.get("lora_request")
        if adapter is None:
            return dict(options)
        name = self._names[adapter.lora_int_id]
        return {**options, "lora_request": msgspec.structs.replace(adapter, lora_name=name)}
