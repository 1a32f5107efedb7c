"""Router: lets the routing policy choose a request's instances, from one generation of weights."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import NamedTuple

from banaserve.base.clock import Clock
from banaserve.base.errors import NoInstanceError, PolicyError
from banaserve.base.types import NOWHERE, ClusterView, InstanceId, RequestView, Route
from banaserve.contracts.trace_events import NoInstance
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import GracefulHTTPError
from banaserve.orchestrator.control.model.output_length import OutputLengthWindow
from banaserve.orchestrator.control.model.resident_prefixes import ResidentPrefixes
from banaserve.orchestrator.control.routing.named import NamedPolicy
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.instances.generations import candidates, is_lost
from banaserve.serving.instances.instance import Instance
from banaserve.serving.requests.decode_batching import DecodeBatching
from banaserve.serving.requests.prefix_lookup import PrefixLookups
from banaserve.serving.tracing.request_log import RequestNotes, SeenRoute

logger = logging.getLogger(__name__)
_POLL_S = 0.1


class WeightsReplacedError(GracefulHTTPError):
    """Error of an answer whose weights a rolling restart has replaced."""

    def __init__(self) -> None:
        super().__init__(
            "a rolling restart has replaced the weights that this answer had begun with: ask again",
            HTTPStatus.SERVICE_UNAVAILABLE,
        )


class RoutedLegs(NamedTuple):
    """Instances of the legs of a request.

    Attributes:
        asked: Request as the policy saw it.
        prefill: Instance of the prefill leg; None if one instance serves both legs.
        decode: Instance of the decode leg, or of both legs.
    """

    asked: RequestView
    route: Route
    prefill: Instance | None
    decode: Instance


class Router:
    """Router of requests to the instances of a cluster, with knowledge of cached prompts.

    Args:
        no_instance_s: Maximum time a request waits for a restart if no instance serves its role, in
            seconds.
        gather_s: Maximum time a decode leg waits to begin together with others, in seconds; 0
            disables waiting.

    Attributes:
        residency: KV in the engines' own caches; nothing is recorded before ``follow_residency``.
        retry_turns: Lock of the only suspect that may run; see ``Suspicion``.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: NamedPolicy,
        clock: Clock,
        no_instance_s: float = 60.0,
        gather_s: float = 0.0,
    ) -> None:
        self.cluster = cluster
        self.policy = policy
        self.lookups = PrefixLookups(cluster)
        self.residency = Residency()
        self.output_lengths = OutputLengthWindow()
        self.retry_turns = asyncio.Lock()
        self.decode_batching = DecodeBatching(gather_s)
        self._clock = clock
        self._no_instance_s = no_instance_s
        self._has_shown_failure = False

    def follow_residency(self, block_tokens: int) -> None:
        """Record from now on what the engines' own caches hold, in blocks of ``block_tokens``."""
        self.residency = Residency(block_tokens)
        self.cluster.supervisor.on_ended.append(self.residency.forget)

    async def route(
        self,
        asked: RequestView,
        split_blocker: str | None,
        notes: RequestNotes,
        weights: str = "",
        avoided: InstanceId | None = None,
    ) -> RoutedLegs:
        """Return the policy's choice; wait for a restart if no instance serves.

        A request that cannot be split has one leg, whatever the policy chooses.

        Args:
            split_blocker: Reason why the request cannot be split into legs; None if it can.
            notes: Notes of the request, to which the choice is added.
            weights: Identity of the weights that the request began with; empty for a new request.
            avoided: Instance that is not chosen if any other can serve; None for none.

        Raises:
            GracefulHTTPError: 503 if still no instance serves; 500 if the policy fails.
            WeightsReplacedError: No instance has those weights any more.
        """
        until_s = self._clock.now() + self._no_instance_s
        waits = False
        while True:
            seen = self._view_of(weights)
            if avoided is not None and avoided in seen.instances:
                left = replace(seen.instances[avoided], ready=False)
                seen = replace(seen, instances={**seen.instances, avoided: left})
            try:
                route = self.policy.route(asked, seen)
            except PolicyError as failure:
                # Later failures are logged without a traceback.
                cause = None if self._has_shown_failure else failure.__cause__
                self._has_shown_failure = True
                logger.error("%s", failure, exc_info=cause)
                error = GracefulHTTPError(str(failure), HTTPStatus.INTERNAL_SERVER_ERROR)
                raise error from None
            except NoInstanceError as nobody:
                if avoided is not None:
                    avoided = None
                    continue
                if not waits:
                    notes.note(NoInstance(str(nobody)), asked.id)
                waits = True
                is_late = self._clock.now() >= until_s and not self.cluster.is_replacing
                if self.cluster.has_failed or is_late:
                    raise GracefulHTTPError(str(nobody), HTTPStatus.SERVICE_UNAVAILABLE) from None
                await asyncio.sleep(_POLL_S)
                continue
            if split_blocker is not None and route.prefill is not None:
                route = Route(None, route.decode, route.reason)
            notes.note(SeenRoute(self.policy.label, route, split_blocker, seen), asked.id)
            known = self.cluster.instances
            prefill = None if route.prefill is None else known[route.prefill]
            return RoutedLegs(asked, route, prefill, known[route.decode])

    def _view_of(self, weights: str) -> ClusterView:
        """Return the view for a request that began with ``weights``: one generation only."""
        views, lengths = self.cluster.views(), self.output_lengths.lengths
        view = ClusterView(now_s=self._clock.now(), instances=views, output_lengths=lengths)
        found = {one.weights for one in self.cluster.instances.values()}
        is_replacing = self.cluster.is_replacing
        if not is_replacing and (len(found) < 2 if not weights else found == {weights}):
            return view
        instances = self.cluster.instances.values()
        if weights and is_lost(instances, weights):
            raise WeightsReplacedError
        chosen = candidates(instances, weights)
        seen = {name: replace(view.instances[name], ready=True) for name in sorted(chosen)}
        return replace(view, instances=seen)


class Residency:
    """Record of the requests that instances have computed, for the next turn of the same chat.

    Args:
        block_tokens: Number of tokens of an engine's KV block; 0 to record nothing, for policies
            that do not use the record.
    """

    def __init__(self, block_tokens: int = 0) -> None:
        self._prefixes = ResidentPrefixes(block_tokens) if block_tokens else None

    def computed(
        self, instance: Instance, request: compat.EngineCoreRequest, output: Sequence[int] = ()
    ) -> None:
        """Record that ``instance`` has the KV of the prompt and of ``output``.

        The last token of ``output`` has no KV yet, and an engine that has ended has no KV.
        """
        if self._prefixes is None or request.prompt_token_ids is None:
            return
        if instance.llm is not None:
            tokens = [*request.prompt_token_ids, *output[:-1]]
            self._prefixes.add(instance.id, _root(request), tokens, instance.view().kv_tokens)

    def found(self, request: compat.EngineCoreRequest) -> Mapping[InstanceId, int]:
        """Return the number of prompt tokens probably cached, by instance.

        See ``ResidentPrefixes``.
        """
        params = request.sampling_params
        if self._prefixes is None or request.prompt_token_ids is None:
            return NOWHERE
        if request.prompt_embeds is not None or (params and params.skip_reading_prefix_cache):
            return NOWHERE
        return self._prefixes.found(_root(request), request.prompt_token_ids)

    def forget(self, instance: InstanceId | None = None) -> None:
        """Forget the cache of ``instance``, or of every instance if None."""
        if self._prefixes is not None:
            self._prefixes.forget(instance)


def _root(request: compat.EngineCoreRequest) -> Hashable:
    """Return the values that distinguish equal tokens, as in vLLM's own hashes of blocks."""
    adapter = request.lora_request.lora_name if request.lora_request is not None else None
    media = tuple(feature.identifier for feature in request.mm_features or ())
    return request.cache_salt, adapter, media
