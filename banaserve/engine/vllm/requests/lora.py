"""LoRA adapters as engines know them: one that is loaded again shares no KV with the one before."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import msgspec

from banaserve.engine.vllm.compat.requests import LoRARequest
from banaserve.engine.vllm.kv_connector.block_hash import describe_adapter


class Adapters:
    """Gives each load of an adapter an id and a name of its own.

    vLLM puts name and path of an adapter into the keys of its KV blocks, and of two adapters with
    one name in one batch it activates only one. Files that were replaced have the same path.
    """

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._names: dict[int, str] = {}

    def begin(self, adapter: LoRARequest) -> None:
        """Take an adapter that engines are about to load.

        Changes it: what is loaded in place of another one gets an id of its own too, since
        requests under way go on with the old weights.
        """
        adapter.lora_int_id, adapter.load_inplace = next(self._ids), False

    async def loaded(self, adapter: LoRARequest) -> None:
        """Hash its files: its name then says after a restart too whether they are the same.

        Raises:
            OSError: One of them cannot be read.
        """
        digest = await asyncio.to_thread(describe_adapter, adapter.lora_path)
        name = f"{adapter.lora_name}@{adapter.lora_int_id}.{digest[:16]}"
        self._names[adapter.lora_int_id] = name

    def resolve_lora(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options of ``generate`` or ``encode`` with the adapter as engines know it."""
        adapter = options.get("lora_request")
        if adapter is None:
            return dict(options)
        name = self._names[adapter.lora_int_id]
        return {**options, "lora_request": msgspec.structs.replace(adapter, lora_name=name)}
