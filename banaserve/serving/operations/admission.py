"""Admission of a new engine behind a running front door."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import dataclass

from banaserve.base.errors import BanaServeError, InstanceDeadError
from banaserve.contracts.rpc.engine_api import WorkerApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat.engine import EngineDeadError
from banaserve.engine.compat.requests import SamplingParams
from banaserve.serving.client import DisaggregatedClient
from banaserve.serving.instances.instance import Instance
from banaserve.serving.requests.prefix_lookup import PrefixLookup, PrefixLookups

_ANSWER_S = 120.0
"""Maximum wait for a new engine's first token, in seconds: some compile or allocate with it."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of new engines: it checks an engine, and adds lookups for the engine's weights.

    Attributes:
        store_socket: Path of the store's socket; empty without a store.
    """

    lookups: PrefixLookups
    client: DisaggregatedClient
    store_socket: str

    async def check(self, instance: Instance) -> None:
        """Return if a new engine may serve.

        Raises:
            InstanceDeadError: The engine may not serve; the message has the reason.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                assert instance.llm is not None
                has = instance.llm.vllm_config.model_config.max_model_len
                if has < (wanted := self.client.model_config.max_model_len):
                    raise InstanceDeadError(
                        f"the new engine of {instance.id} has a context of {has} tokens, and the "
                        f"front door takes prompts of up to {wanted}"
                    )
                await self._check_answer(instance)
                await self._add_lookup(instance)
        except TimeoutError:
            raise InstanceDeadError(
                f"the new engine of {instance.id} has not answered in {_ANSWER_S:.0f} s"
            ) from None
        except EngineDeadError:
            said = instance.last_words()
            raise InstanceDeadError(f"the new engine of {instance.id} ended: {said}") from None
        except InstanceDeadError:
            raise
        except BanaServeError as refused:
            raise InstanceDeadError(f"the new engine of {instance.id}: {refused}") from refused

    def forget(self, weights: str) -> None:
        """Stop looking up blocks of all weights other than ``weights``."""
        self.lookups.keep_only(weights)

    async def _check_answer(self, instance: Instance) -> None:
        """Check that a token's log probability is finite: wrong weights may load without error."""
        if "generate" not in await self.client.get_supported_tasks():
            return
        assert instance.llm is not None
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, detokenize=False)
        name = f"first-token-{instance.id}.{instance.incarnation}"
        stream = instance.llm.generate({"prompt_token_ids": [0, 1]}, params, name)
        async with contextlib.aclosing(stream) as outputs:
            async for output in outputs:
                found = output.outputs[0].cumulative_logprob
        if found is None or not math.isfinite(found):
            raise InstanceDeadError(
                f"the new engine of {instance.id} computes no numbers ({found}): are its weights "
                "those of this model?"
            )

    async def _add_lookup(self, instance: Instance) -> None:
        if not self.store_socket or instance.weights in self.lookups.by_weights:
            return
        assert instance.llm is not None
        asked = call(WorkerApi.banaserve_fingerprint)
        answers = await instance.llm.collective_rpc(asked.name)
        fingerprint = asked.read(answers[0])
        assert fingerprint is not None, "with a store every worker has a connector"
        lookup = await asyncio.to_thread(
            PrefixLookup, instance.engine_config, fingerprint, self.store_socket
        )
        self.lookups.by_weights[instance.weights] = lookup
