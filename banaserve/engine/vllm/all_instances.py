"""What vLLM's engine client does for its one engine, done for every instance."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from vllm.lora.request import LoRARequest

from banaserve.engine.vllm.adapters import Adapters
from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.journey import Job
from banaserve.engine.vllm.refusals import Refusals, check_sleep, check_weights_stay


class AllInstances(Refusals):
    """Asks all instances that serve; requests themselves go other ways."""

    _cluster: Cluster
    _adapters: Adapters
    _jobs: dict[int, Job]

    async def _all(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        llms = [i.llm for i in self._cluster.serving() if i.llm is not None]
        return await asyncio.gather(*(getattr(llm, method)(*args, **kwargs) for llm in llms))

    def _end_all(self, mode: Any) -> None:
        """A prefill leg that ends by this is no death, after which it would be tried again."""
        if mode == "abort":
            for job in self._jobs.values():
                job.aborted = True

    async def start_profile(self, profile_prefix: str | None = None, **options: Any) -> None:
        await self._all("start_profile", profile_prefix, **options)

    async def stop_profile(self) -> None:
        await self._all("stop_profile")

    async def reset_mm_cache(self) -> None:
        await self._all("reset_mm_cache")

    async def reset_encoder_cache(self) -> None:
        await self._all("reset_encoder_cache")

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        return all(await self._all("reset_prefix_cache", reset_running_requests, reset_connector))

    async def sleep(self, level: int = 1, mode: Any = "abort") -> None:
        check_sleep(level)
        self._end_all(mode)
        await self._all("sleep", level, mode)

    async def release_kv_cache_memory(self) -> None:
        await self._all("release_kv_cache_memory")

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        return all(await self._all("wake_up", tags))

    async def is_sleeping(self) -> bool:
        return any(await self._all("is_sleeping"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        self._adapters.begin(lora_request)
        added = all(await self._all("add_lora", lora_request))
        await self._adapters.loaded(lora_request)
        return added

    async def pause_generation(self, *, mode: Any = "abort", clear_cache: bool = True) -> None:
        self._end_all(mode)
        await self._all("pause_generation", mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        await self._all("resume_generation")

    async def is_paused(self) -> bool:
        return any(await self._all("is_paused"))

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        check_weights_stay(method)
        answers = await self._all("collective_rpc", method, timeout, args, kwargs)
        return [one for answer in answers for one in answer]

    async def notify_kv_transfer_request_rejected(
        self,
        request_id: str,
        kv_transfer_params: Mapping[str, Any],
        *,
        data_parallel_rank: int | None = None,
    ) -> None:
        """Nothing to clean up: leases end with their request."""
