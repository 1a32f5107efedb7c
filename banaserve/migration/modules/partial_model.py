"""Consecutive decoder layers of a model, built as a pipeline stage with any range.

Also the device that a guest computes on, and the kernels of its attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from banaserve.base.errors import MigrationError
from banaserve.engine.compat.config import VllmConfig, set_current_vllm_config
from banaserve.engine.compat.runner import model as compat
from banaserve.engine.compat.runner.attention import (
    CommonAttentionMetadata,
    metadata_builder,
    set_default_torch_dtype,
    set_forward_context,
)
from banaserve.engine.compat.runner.model import PPMissingLayer, get_model_loader
from banaserve.engine.migration_settings import MigrationSettings, settings_of
from banaserve.kernels.interface import Kernels
from banaserve.migration.modules.attention_backend import kernels_for
from banaserve.migration.modules.layer_proxy import Around, LayerChain
from banaserve.migration.modules.paged_attention import KernelsAttention, StepBatches


def device_of(config: VllmConfig) -> torch.device:
    """Return the device of weights and KV of this tensor-parallel rank, among the visible ones."""
    kind = str(config.device_config.device_type)
    return torch.device(kind, config.parallel_config.rank) if kind != "cpu" else torch.device("cpu")


def on_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return a context in which a GPU is this thread's current one; each thread begins with 0."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def attends_with(config: VllmConfig) -> Kernels | None:
    """Return the kernels of a guest's attention, the same as its host's; None: vLLM's own.

    Raises:
        MigrationError: The chosen kernels cannot run here.
    """
    settings = settings_of(config) or MigrationSettings()
    return kernels_for(settings.attention, device_of(config))


class PartialModel:
    """Layers ``start`` to ``end - 1`` with their weights; KV is bound afterwards.

    Args:
        kernels: Kernels of the attention; None: vLLM's own.

    Attributes:
        weight_bytes: Bytes of all parameters.
    """

    def __init__(
        self,
        config: VllmConfig,
        path: str,
        start: int,
        end: int,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._device = device
        context = config.compilation_config.static_forward_context
        known = set(context)
        try:
            layers = self._layers(path, start, end)
        except BaseException:
            _forget(context, set(context) - known)  # or no other model could use these names
            raise
        self._names = [name for name in context if name not in known]
        self.layers = layers
        self._chain = LayerChain(layers)
        self.attentions = {
            name: context[name] for name in self._names if hasattr(context[name], "kv_cache")
        }
        self._builder: Any = None

    def _layers(self, path: str, start: int, end: int) -> list[nn.Module]:
        model = self._build(start, end)
        layers = [m for m in _submodule(model, path) if not isinstance(m, PPMissingLayer)]
        if len(layers) != end - start:
            raise MigrationError(f"{path} does not hold layers {start}:{end} of this model")
        return layers

    def _build(self, start: int, end: int) -> nn.Module:
        model_config = self._config.model_config
        with set_default_torch_dtype(model_config.dtype):
            with compat.pipeline_stage(start, end), set_current_vllm_config(self._config):
                with self._device:
                    model: nn.Module = compat.initialize_model(self._config)
                get_model_loader(self._config.load_config).load_weights(model, model_config)
            # Counted here: later, some kernels pack weights into memory that would not be counted.
            self.weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
            with set_current_vllm_config(self._config):
                compat.process_weights_after_loading(model, model_config, self._device)
        return model

    def bind(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Give each attention its KV cache, ``[num_blocks, heads, ...]``."""
        for name, attention in self.attentions.items():
            attention.bind_kv_cache(kv_caches[name])
        if self._kernels is not None:
            batches = StepBatches()
            for name, attention in self.attentions.items():
                KernelsAttention(attention, name, self._kernels, batches)
            return
        first = next(iter(self.attentions.values()))
        self._builder = metadata_builder(self._config, first, list(self.attentions), self._device)

    def run(
        self, common: CommonAttentionMetadata, arguments: Mapping[str, Any], around: Around
    ) -> Any:
        """Run one step through all layers.

        Returns:
            The values of the last layer.
        """
        # Our kernels make their own form of the batch.
        metadata = common if self._builder is None else self._builder.build(0, common)
        with (
            torch.inference_mode(),
            set_forward_context(
                dict.fromkeys(self.attentions, metadata),
                self._config,
                num_tokens=common.num_actual_tokens,
                slot_mapping=dict.fromkeys(self.attentions, common.slot_mapping),
            ),
        ):
            return self._chain.run(arguments, around)

    def close(self) -> None:
        """Release weights and KV."""
        _forget(self._config.compilation_config.static_forward_context, self._names)
        self._chain, self.attentions, self._builder = LayerChain([]), {}, None
        self.layers = []


def _forget(context: dict[str, Any], names: Iterable[str]) -> None:
    for name in names:
        context.pop(name, None)


def _submodule(model: nn.Module, path: str) -> Sequence[nn.Module]:
    try:
        found = model.get_submodule(path)
    except AttributeError:
        raise MigrationError(f"this model has no {path}") from None
    if not isinstance(found, nn.ModuleList):
        raise MigrationError(f"{path} of this model is no list of layers")
    return list(found)
