"""List of what banaserve changes in vLLM at run time: what it wraps, replaces and sets.

All other uses of vLLM are imports and calls that mypy checks against the installed vLLM. An
assignment to a method or to a name of a module says nothing of parameters, so they are listed here,
and ``tests/engine/test_hooks.py`` compares them with the installed vLLM.
``docs/repository/vllm_names.py`` finds hooks that are missing here.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Hook(NamedTuple):
    """Function, class or value of vLLM that banaserve wraps or replaces.

    Attributes:
        change: ``wrapped`` if banaserve's function runs around it, ``replaced`` otherwise.
        name: Name, qualified within the module.
        parameters: Parameters that banaserve's function takes, without ``self``; ``a=`` is passed
            by name, ``...`` stands for all others. None if the name is no function.
    """

    change: str
    module: str
    name: str
    parameters: tuple[str, ...] | None
    purpose: str

    @property
    def path(self) -> str:
        """Module and name, as in an import."""
        return f"{self.module}.{self.name}"


# A module; below it, for each hook: change and name, purpose, and parameters in brackets.
_TEXT = """
vllm.compilation.breakable_cudagraph
    replaced BreakableCUDAGraphCapture._begin_segment: captures beside other threads
        ()
vllm.distributed.device_communicators.shm_broadcast
    wrapped SpinCondition.__init__: ranks on CPU sleep between steps
        (is_reader, context, notify_address, busy_loop_s)
vllm.distributed.parallel_state
    replaced _PP: a guest is a pipeline stage with any range of layers
vllm.distributed.utils
    replaced get_pp_indices: a guest is a pipeline stage with any range of layers
        (...)
vllm.model_executor.layers.attention
    replaced Attention.impl: attention of a layer in several places
vllm.model_executor.layers.fused_moe.routed_experts
    replaced RoutedExperts.forward_modular: experts of a layer in several places
        (x=, topk_weights=, topk_ids=, shared_experts=, shared_experts_input=)
vllm.model_executor.layers.fused_moe.runner.shared_experts
    replaced SharedExperts.wait: shared experts on another stream, before a break in a graph
        ()
vllm.model_executor.models.utils
    replaced _model_to_pp_missing_layer_names: a guest that builds other layers than before
vllm.platforms.interface
    replaced Platform.register_triton_kernel_overrides: kernels for forks
        ()
vllm.v1.attention.backend
    wrapped AttentionMetadataBuilder.build: metadata of a batch
        (common_prefix_len, common_attn_metadata, ...)
vllm.v1.attention.backends.cpu_attn
    replaced CPUAttentionBackendImpl.do_kv_cache_update: attention of a layer in several places
        (layer, key, value, kv_cache, slot_mapping)
    replaced CPUAttentionBackendImpl.forward: attention of a layer in several places
        (layer, query, key, value, kv_cache, attn_metadata, output, ...)
vllm.v1.core.sched.scheduler
    replaced Scheduler.__init__: steps end where states are saved
        (vllm_config, kv_cache_config, ...)
    replaced Scheduler._handle_invalid_blocks: requests start over whose KV could not be fetched
        (invalid_block_ids, num_scheduled_tokens)
    replaced Scheduler._mamba_block_aligned_split: steps end where states are saved
        (request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens)
    replaced Scheduler.waiting: order of waiting requests
vllm.v1.cudagraph_dispatcher
    wrapped CudagraphDispatcher.dispatch: steps without a graph while none is captured
        (num_tokens, ...)
vllm.v1.engine.async_llm
    replaced IterationStats: metrics of requests by their legs
        ()
    replaced load_stat_logger_plugin_factories: entry points are read once
        ()
    replaced renderer_from_config: one renderer for all clients
        (config)
vllm.v1.engine.core
    wrapped EngineCore.preprocess_add_request: a request brings output along
        (request)
    replaced EngineCoreProc._handle_shutdown: an engine core ends as a death does
        ()
    wrapped EngineCoreProc._process_input_queue: an emulated clock stands still while idle
        ()
    replaced EngineCoreProc._reject_add_in_shutdown: an engine core ends as a death does
        (request)
    wrapped EngineCoreProc.process_output_sockets: an engine core that can answer nobody ends
        (output_paths, coord_output_path, engine_index)
    replaced StructuredOutputManager: a backend for each request's grammar
vllm.v1.engine.output_processor
    wrapped RequestState.make_request_output: when the first token was there
        (new_token_ids, ...)
vllm.v1.outputs
    wrapped AsyncModelRunnerOutput.get_output: steps that lost KV
        ()
vllm.v1.worker.cpu_model_runner
    wrapped CPUModelRunner._sample: seeds with chunked prefill on CPU
        (...)
    wrapped CPUModelRunner.execute_model: steps that lost KV
        (scheduler_output, ...)
    wrapped CPUModelRunner.initialize_kv_cache: the KV cache gets slabs of its own
        (...)
    wrapped CPUModelRunner.initialize_kv_cache_tensors: the KV cache gets slabs of its own
        (...)
    wrapped CPUModelRunner.sample_tokens: steps that lost KV
        (grammar_output, ...)
    wrapped CPUModelRunner.warming_up_model: compiles the model and no more
        ()
vllm.v1.worker.gpu.cudagraph_utils
    wrapped CudaGraphManager.dispatch: steps without a graph while none is captured
        (num_reqs, num_tokens, ...)
    replaced prepare_inputs_to_capture: captures ask no guest
        (...)
    replaced tqdm: captures without a progress bar
vllm.v1.worker.gpu.model_runner
    wrapped GPUModelRunner.execute_model: steps that lost KV
        (scheduler_output, ...)
    wrapped GPUModelRunner.initialize_kv_cache: the KV cache gets slabs of its own
        (kv_cache_config, is_profiling=, ...)
    wrapped GPUModelRunner.sample_tokens: steps that lost KV
        (grammar_output, ...)
    wrapped init_kv_cache: the KV cache gets slabs of its own
        (...)
vllm.v1.worker.gpu_input_batch
    wrapped InputBatch.add_request: a request brings output along
        (request)
vllm.v1.worker.gpu_model_runner
    wrapped GPUModelRunner._update_states: a request brings output along
        (scheduler_output)
    wrapped GPUModelRunner.execute_model: steps that lost KV
        (scheduler_output, ...)
    wrapped GPUModelRunner.initialize_kv_cache: the KV cache gets slabs of its own
        (...)
    wrapped GPUModelRunner.initialize_kv_cache_tensors: the KV cache gets slabs of its own
        (...)
    wrapped GPUModelRunner.sample_tokens: steps that lost KV
        (grammar_output, ...)
vllm.v1.worker.worker_base
    wrapped WorkerWrapperBase.init_device: workers in processes of their own do what ours does
        ()
"""


def _hooks() -> list[Hook]:
    """Read the text above."""
    module, found = "", []
    for line in _TEXT.strip().splitlines():
        if not line.startswith(" "):
            module = line
        elif hook := re.fullmatch(r" {4}(wrapped|replaced) ([\w.]+): (.+)", line):
            change, name, purpose = hook.groups()
            found.append(Hook(change, module, name, None, purpose))
        else:
            found[-1] = found[-1]._replace(parameters=tuple(re.findall(r"[\w.]+=?", line)))
    return found


HOOKS = tuple(_hooks())

SET_ATTRIBUTES = {
    "vllm.config.CacheConfig": "block_size num_gpu_blocks",
    "vllm.config.ParallelConfig": "rank",
    "vllm.config.SchedulerConfig": "scheduler_cls",
    "vllm.config.CompilationConfig": "custom_ops",
    "vllm.engine.arg_utils.EngineArgs": "enable_prefix_caching mamba_cache_mode kv_transfer_config",
    "vllm.config.ObservabilityConfig": "otlp_traces_endpoint",
    "vllm.lora.request.LoRARequest": "lora_int_id lora_name lora_path load_inplace",
    "vllm.outputs.RequestOutput": "outputs finished",
    "vllm.outputs.CompletionOutput": "index",
    "vllm.sampling_params.SamplingParams": (
        "n max_tokens min_tokens stop output_text_buffer_length detokenize output_kind "
        "extra_args seed prompt_logprobs"
    ),
    "vllm.v1.engine.EngineCoreRequest": (
        "request_id external_req_id prompt_token_ids sampling_params cache_salt "
        "reasoning_ended reasoning_parser_kwargs"
    ),
    "vllm.v1.engine.core_client.BackgroundResources": "engine_dead",
    "vllm.v1.engine.output_processor.RequestOutputCollector": "output",
    "vllm.v1.engine.output_processor.RequestState": (
        "queue remote_prefill_cached_tokens num_cache_creation_tokens stats"
    ),
    "vllm.v1.request.Request": (
        "prefill_stats _block_hasher block_hashes skip_reading_prefix_cache drop_stale_output"
    ),
    "vllm.v1.structured_output.request.StructuredOutputRequest": "grammar",
    "vllm.v1.metrics.stats.IterationStats": "num_generation_tokens num_preempted_reqs",
    "vllm.v1.metrics.stats.PromptTokenStats": "computed",
    "vllm.v1.metrics.stats.RequestStateStats": "queued_ts",
    "vllm.v1.metrics.stats.FinishedRequestStats": (
        "queued_time prefill_time decode_time inference_time"
    ),
    "vllm.v1.structured_output.StructuredOutputManager": "backend",
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "need_mamba_block_aligned_split max_num_scheduled_tokens max_num_active_reqs"
    ),
    "vllm.v1.core.block_pool.BlockPool": "num_gpu_blocks",
    "vllm.v1.kv_cache_interface.KVCacheConfig": "num_blocks",
    "vllm.v1.attention.backends.cpu_attn.CPUAttentionMetadataBuilder": "isa num_heads",
    "vllm.forward_context.ForwardContext": "skip_compiled",
    "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts": (
        "global_num_experts local_num_experts"
    ),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": "output_token_ids generator",
    "vllm.compilation.breakable_cudagraph.BreakableCUDAGraphCapture": "_current_graph _capturing",
    "vllm.compilation.breakable_cudagraph.BreakableCUDAGraphWrapper": "entries",
    "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager": "_capture_descs",
    "vllm.v1.engine.async_llm.AsyncLLM": "renderer",
}
"""Attributes of vLLM's objects that banaserve assigns, by class."""
