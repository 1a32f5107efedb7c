"""List of all names of vLLM that banaserve relies on.

vLLM is imported in this folder and nowhere else. The list holds every name that is imported here,
and every method and attribute of vLLM's objects that banaserve calls, reads, sets, overrides,
wraps or replaces, here or elsewhere. vLLM documents a few of them: ``LLM``, ``SamplingParams``, the
engine arguments, ``KVConnectorBase_V1``, ``EngineClient``, the scheduler class and the worker
extension. All the others are internal and may change with any release.

``checker`` compares the list with the sources of a version of vLLM. This module imports nothing of
vLLM, so that the list can be read where no vLLM is installed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class NameKind(enum.Enum):
    """Kind of a name in vLLM."""

    MODULE = "module"
    CLASS = "class"
    FUNCTION = "function"
    METHOD = "method"
    ATTRIBUTE = "attribute"
    VALUE = "value"


class Hook(enum.Enum):
    """Way in which banaserve changes the behaviour of a name in vLLM.

    Attributes:
        NONE: banaserve only uses the name.
        IMPLEMENTED: A class of banaserve has this abstract class as its base.
        OVERRIDDEN: A class of banaserve overrides this method or attribute.
        WRAPPED: A function of banaserve runs around it.
        REPLACED: A function or object of banaserve replaces it.
        SET: banaserve assigns to it.
    """

    NONE = ""
    IMPLEMENTED = "implemented"
    OVERRIDDEN = "overridden"
    WRAPPED = "wrapped"
    REPLACED = "replaced"
    SET = "set"


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters that a call by banaserve relies on, or that a method of banaserve takes.

    Attributes:
        positional: Parameters passed by position: the first ones, in this order, without ``self``.
        keywords: Parameters passed by name.
        is_open: True if all other arguments that vLLM passes are passed on.
    """

    positional: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    is_open: bool = False

    @classmethod
    def of(cls, text: str) -> Parameters:
        """Read ``a, b, c=, ...``: ``c`` is passed by name, and ``...`` leaves the list open."""
        words = [word.strip() for word in text.split(",") if word.strip()]
        return cls(
            tuple(word for word in words if word != "..." and not word.endswith("=")),
            tuple(word[:-1] for word in words if word.endswith("=")),
            "..." in words,
        )


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the list: a name of vLLM.

    Attributes:
        group: Module of this folder through which the name is used.
        module: Module of vLLM that contains the name.
        name: Name qualified within the module; empty for the module itself.
        purpose: Purpose for which banaserve uses the name.
        parameters: Parameters that banaserve relies on; None for none.
        alternatives: Modules that contain the name instead in other versions of vLLM.
    """

    group: str
    module: str
    name: str
    kind: NameKind
    purpose: str
    parameters: Parameters | None = None
    hook: Hook = Hook.NONE
    alternatives: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Module and name, as in an import."""
        return f"{self.module}.{self.name}" if self.name else self.module

    def in_module(self, module: str) -> Entry:
        """Return the entry of the same name in another module."""
        return replace(self, module=module)


def _entry(
    group: str, module: str, kind: NameKind, text: str, purpose: str, hook: Hook = Hook.NONE
) -> Entry:
    """Read ``Name.method(a, b=)``; without brackets banaserve relies on no parameters."""
    name, bracket, rest = text.partition("(")
    parameters = Parameters.of(rest.removesuffix(")")) if bracket else None
    return Entry(group, module, name, kind, purpose, parameters, hook)


def _classes(group: str, module: str, purpose: str, *texts: str) -> list[Entry]:
    return [_entry(group, module, NameKind.CLASS, text, purpose) for text in texts]


def _functions(group: str, module: str, purpose: str, *texts: str) -> list[Entry]:
    return [_entry(group, module, NameKind.FUNCTION, text, purpose) for text in texts]


def _methods(
    group: str, module: str, owner: str, purpose: str, *texts: str, hook: Hook = Hook.NONE
) -> list[Entry]:
    return [
        _entry(group, module, NameKind.METHOD, f"{owner}.{text}", purpose, hook) for text in texts
    ]


def _attributes(
    group: str, module: str, owner: str, purpose: str, names: str, hook: Hook = Hook.NONE
) -> list[Entry]:
    return [
        _entry(group, module, NameKind.ATTRIBUTE, f"{owner}.{name}", purpose, hook)
        for name in names.split()
    ]


def _modules(group: str, purpose: str, *modules: str) -> list[Entry]:
    return [Entry(group, module, "", NameKind.MODULE, purpose) for module in modules]


def _either(entry: Entry, *modules: str) -> Entry:
    return replace(entry, alternatives=modules)


_CONFIG = [
    *_classes("config", "vllm.config", "configuration of engines", "VllmConfig", "ModelConfig",
              "ParallelConfig", "CompilationMode", "CUDAGraphMode"),
    *_functions("config", "vllm.config", "configuration while vLLM's modules are built",
                "set_current_vllm_config(vllm_config)"),
    *_classes("config", "vllm.usage.usage_lib", "required to make an engine", "UsageContext"),
    *_attributes("config", "vllm.usage.usage_lib", "UsageContext", "required to make an engine",
                 "OPENAI_API_SERVER"),
    *_attributes("config", "vllm.config", "CompilationMode", "refuses compiled engines",
                 "NONE STOCK_TORCH_COMPILE"),
    *_attributes("config", "vllm.config", "CUDAGraphMode", "refuses whole CUDA graphs",
                 "NONE PIECEWISE"),
    Entry("config", "vllm.platforms", "current_platform", NameKind.VALUE, "CPU or GPU"),
    *_methods("config", "vllm.platforms.interface", "Platform", "CPU or GPU", "is_cpu()"),
    *_methods("config", "vllm.platforms.interface", "Platform", "whether kernels load",
              "import_kernels()"),
    *_functions("config", "vllm.v1.attention.backends.utils", "KV layout of a guest",
                "record_kv_cache_layout(cache_config, layout_name)"),
    *_functions("config", "vllm.ir", "kernels of a guest", "set_default_torch_wrap(enable)"),
    *_attributes("config", "vllm.config.kernel", "KernelConfig", "kernels of a guest",
                 "ir_op_priority"),
    *_methods("config", "vllm.config.kernel", "IrOpPriorityConfig", "kernels of a guest",
              "set_default()"),
    *_attributes("config", "vllm.config", "CompilationConfig", "kernels of a guest",
                 "ir_enable_torch_wrap"),
    *_attributes("config", "vllm.config", "VllmConfig", "parts of the configuration",
                 "model_config cache_config parallel_config scheduler_config device_config "
                 "kernel_config load_config lora_config speculative_config compilation_config "
                 "observability_config kv_transfer_config additional_config use_v2_model_runner"),
    *_attributes("config", "vllm.config", "ModelConfig", "identity and shape of the model",
                 "model revision dtype quantization hf_overrides hf_text_config max_model_len "
                 "logits_processors enforce_eager use_mla is_encoder_decoder is_mm_prefix_lm "
                 "uses_mrope architecture is_hybrid is_attention_free has_inner_state "
                 "runner_type"),
    *_attributes("config", "vllm.config", "ModelConfig", "what the front door goes by",
                 "tokenizer skip_tokenizer_init"),
    *_methods("config", "vllm.config", "ModelConfig", "what the front door goes by",
              "get_diff_sampling_param()", "try_get_generation_config()", "get_vocab_size()"),
    *_methods("config", "vllm.config", "ModelConfig", "shape of the model",
              "get_num_layers(parallel_config)", "get_num_kv_heads(parallel_config)",
              "get_total_num_kv_heads()",
              "get_head_size()", "get_hidden_size()", "get_num_experts()"),
    *_attributes("config", "vllm.config", "CacheConfig", "size, type and hashes of the KV cache",
                 "cache_dtype prefix_caching_hash_algo kv_cache_layout kv_cache_memory_bytes "
                 "gpu_memory_utilization"),
    *_attributes("config", "vllm.config", "CacheConfig", "size of the KV cache",
                 "block_size num_gpu_blocks", Hook.SET),
    *_attributes("config", "vllm.config", "ParallelConfig", "workers of an instance",
                 "tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size "
                 "decode_context_parallel_size data_parallel_size world_size"),
    *_attributes("config", "vllm.config", "ParallelConfig", "a guest of a worker", "rank",
                 Hook.SET),
    *_attributes("config", "vllm.config", "ParallelConfig", "a guest of a worker",
                 "disable_custom_all_reduce"),
    *_attributes("config", "vllm.config", "SchedulerConfig", "budgets and scheduler of an engine",
                 "max_num_scheduled_tokens max_num_batched_tokens max_num_active_seqs max_num_seqs "
                 "async_scheduling policy"),
    *_attributes("config", "vllm.config", "SchedulerConfig", "scheduler whose pool can change",
                 "scheduler_cls", Hook.SET),
    *_attributes("config", "vllm.config", "CompilationConfig", "refuses compiled engines; modules "
                 "by name", "mode cudagraph_mode static_forward_context"),
    *_attributes("config", "vllm.config", "CompilationConfig", "kernels that MLA goes without",
                 "custom_ops", Hook.SET),
    *_attributes("config", "vllm.engine.arg_utils", "EngineArgs", "states beside KV blocks",
                 "enable_prefix_caching mamba_cache_mode kv_transfer_config", Hook.SET),
    *_attributes("config", "vllm.config", "DeviceConfig", "CPU or GPU", "device_type"),
    *_attributes("config", "vllm.config.load", "LoadConfig", "whether weights are real",
                 "load_format"),
    *_attributes("config", "vllm.config", "ObservabilityConfig", "spans are the front door's",
                 "otlp_traces_endpoint", Hook.SET),
    *_attributes("config", "vllm.config", "KVTransferConfig", "options of the connector",
                 "kv_connector kv_connector_extra_config"),
    *_methods("config", "vllm.config", "KVTransferConfig", "options of the connector",
              "get_from_extra_config(key, default)"),
]  # fmt: skip

_REQUESTS = [
    *_classes("requests", "vllm.exceptions", "an error with its HTTP status",
              "GracefulHTTPError(message, http_status)"),
    *_classes("requests", "vllm.lora.request", "adapters of requests", "LoRARequest"),
    *_attributes("requests", "vllm.lora.request", "LoRARequest", "an id and a name for each load",
                 "lora_int_id lora_name lora_path load_inplace", Hook.SET),
    *_classes("requests", "vllm.outputs", "outputs of a request", "PoolingRequestOutput",
              "RequestOutput"),
    *_attributes("requests", "vllm.outputs", "RequestOutput", "outputs of a leg",
                 "num_cached_tokens num_cache_creation_tokens"),
    *_attributes("requests", "vllm.outputs", "PoolingRequestOutput", "tokens of a tenant",
                 "finished prompt_token_ids"),
    *_attributes("requests", "vllm.outputs", "RequestOutput", "one of several sequences",
                 "outputs finished", Hook.SET),
    *_attributes("requests", "vllm.outputs", "CompletionOutput", "outputs of a leg",
                 "token_ids finish_reason stop_reason logprobs"),
    *_attributes("requests", "vllm.outputs", "CompletionOutput", "whether a new engine computes",
                 "cumulative_logprob"),
    *_attributes("requests", "vllm.outputs", "CompletionOutput", "one of several sequences",
                 "index", Hook.SET),
    *_attributes("requests", "vllm.logprobs", "Logprob", "logprobs of a token that prefill sampled",
                 "logprob rank"),
    *_classes("requests", "vllm.pooling_params", "pooling requests", "PoolingParams"),
    *_classes("requests", "vllm.sampling_params", "parameters of requests and legs",
              "RequestOutputKind", "SamplingParams(temperature=, ignore_eos=, watermarking=, "
              "max_tokens=)"),
    *_classes("requests", "vllm.sampling_params", "draws without a seed", "SamplingType"),
    *_attributes("requests", "vllm.sampling_params", "SamplingType", "draws without a seed",
                 "RANDOM"),
    *_attributes("requests", "vllm.sampling_params", "RequestOutputKind", "outputs of a leg",
                 "FINAL_ONLY"),
    *_attributes("requests", "vllm.sampling_params", "SamplingParams", "parameters of a leg",
                 "n max_tokens min_tokens stop output_text_buffer_length detokenize output_kind "
                 "extra_args seed prompt_logprobs", Hook.SET),
    *_attributes("requests", "vllm.sampling_params", "SamplingParams",
                 "whether prefill's token may be the first one",
                 "temperature top_p top_k min_p stop_token_ids ignore_eos skip_special_tokens "
                 "spaces_between_special_tokens include_stop_str_in_output stream_interval "
                 "skip_clone logit_bias allowed_token_ids skip_reading_prefix_cache _eos_token_id "
                 "_all_stop_token_ids presence_penalty frequency_penalty repetition_penalty "
                 "bad_words _bad_words_token_ids structured_outputs logprobs sampling_type"),
]  # fmt: skip

_CLI_ARGS = "vllm.entrypoints.launchers.cli_args"
_CLI_ARGS_033 = "vllm.entrypoints.common.cli_args"

_TOOL_PARSERS = [
    *_functions("tool_parsers", "vllm.renderers.chat_utils", "how a model writes calls of tools",
                "load_chat_template(chat_template)"),
    *_functions("tool_parsers", "vllm.utils.mistral", "who writes a model's calls of tools",
                "is_mistral_tokenizer(obj)"),
    *_classes("tool_parsers", "vllm.parser.parser_manager", "parser that a model needs",
              "ParserManager"),
    *_methods("tool_parsers", "vllm.parser.parser_manager", "ParserManager",
              "parser that a model needs", "get_parser(tool_parser_name=, reasoning_parser_name=, "
              "enable_auto_tools=, model_name=, is_harmony=, tool_strict_level=, tokenizer=)"),
    *_classes("tool_parsers", "vllm.entrypoints.openai.chat_completion.protocol",
              "parser that a model needs", "ChatCompletionRequest"),
    *_methods("tool_parsers", "vllm.tool_parsers.abstract_tool_parser", "ToolParser",
              "parser that a model needs", "extract_tool_calls(model_output, request)"),
    *_functions("tool_parsers", "vllm.tokenizers", "how a model writes calls of tools",
                "cached_tokenizer_from_config(model_config=)"),
]  # fmt: skip

_SERVER = [
    Entry("server", "vllm", "envs", NameKind.MODULE, "environment of vLLM's server"),
    Entry("server", "vllm.envs", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE", NameKind.VALUE,
          "how long idle connections are kept"),
    *_classes("server", "vllm.engine.arg_utils", "options of engines", "AsyncEngineArgs"),
    *_methods("server", "vllm.engine.arg_utils", "AsyncEngineArgs", "options of engines",
              "from_cli_args(args)", "create_engine_config(usage_context)"),
    *(
        _either(entry, _CLI_ARGS_033)
        for entry in _functions("server", _CLI_ARGS, "options of vLLM's server",
                                "make_arg_parser(parser)", "validate_parsed_serve_args(args)")
    ),
    *_classes("server", "vllm.utils.argparse_utils", "options of vLLM's server",
              "FlexibleArgumentParser(...)"),
    *_functions("server", "vllm.entrypoints.launchers.api_server.app_state",
                "binds vLLM's application to our client",
                "init_app_state(engine_client, state, args, supported_tasks)"),
    *_functions("server", "vllm.entrypoints.launchers.app", "vLLM's application",
                "build_app(args, supported_tasks, model_config)"),
    *_functions("server", "vllm.entrypoints.launchers.launcher", "names of parsers",
                "validate_api_server_args(args)"),
    *_classes("server", "vllm.tool_parsers", "parsers that users bring along", "ToolParserManager"),
    *_methods("server", "vllm.tool_parsers", "ToolParserManager", "parsers that users bring along",
              "import_tool_parser(plugin_path)"),
    *_classes("server", "vllm.reasoning", "parsers that users bring along",
              "ReasoningParserManager"),
    *_methods("server", "vllm.reasoning", "ReasoningParserManager",
              "parsers that users bring along", "import_reasoning_parser(plugin_path)"),
    *_functions("server", "vllm.tracing.otel", "sends spans of requests",
                "get_span_exporter(endpoint)"),
    *_functions("server", "vllm.tokenizers", "vocabulary for checks of grammars",
                "cached_tokenizer_from_config(model_config=)"),
    *_functions("server", "vllm.renderers.inputs.preprocess", "text of a prompt",
                "extract_prompt_components(model_config, prompt)"),
    *_methods("server", "vllm.renderers.base", "BaseRenderer", "end of the server", "shutdown()"),
    *_classes("server", "vllm.v1.engine.input_processor", "prepares requests once",
              "InputProcessor(vllm_config, renderer)"),
    *_methods("server", "vllm.v1.engine.input_processor", "InputProcessor",
              "prepares requests once",
              "process_inputs(request_id, prompt, params, supported_tasks=)",
              "assign_request_id(request)"),
    *_attributes("server", "vllm.v1.engine.input_processor", "InputProcessor",
                 "prepares requests once", "process_inputs_async"),
    _entry("server", "vllm.engine.protocol", NameKind.CLASS, "EngineClient",
           "what vLLM's server asks of an engine", Hook.IMPLEMENTED),
    *_attributes("server", "vllm.engine.protocol", "EngineClient",
                 "what vLLM's server asks of an engine", "is_running is_stopped errored dead_error",
                 Hook.OVERRIDDEN),
    *_methods("server", "vllm.engine.protocol", "EngineClient",
              "what vLLM's server asks of an engine",
              "generate(prompt, sampling_params, request_id, ...)",
              "encode(prompt, pooling_params, request_id, ...)",
              "check_admission(n, request_id)",
              "abort(request_id)",
              "notify_kv_transfer_request_rejected(request_id, kv_transfer_params, "
              "data_parallel_rank=)",
              "is_tracing_enabled()",
              "do_log_stats()",
              "check_health()",
              "start_profile(profile_prefix, ...)",
              "stop_profile()",
              "reset_mm_cache()",
              "reset_encoder_cache()",
              "reset_prefix_cache(reset_running_requests, reset_connector)",
              "sleep(level, mode)",
              "release_kv_cache_memory()",
              "wake_up(tags)",
              "is_sleeping()",
              "add_lora(lora_request)",
              "pause_generation(mode=, clear_cache=)",
              "resume_generation()",
              "is_paused()",
              "shutdown(timeout)",
              "collective_rpc(method, timeout, args, kwargs)",
              "get_supported_tasks()",
              hook=Hook.OVERRIDDEN),
    *_methods("server", "vllm.engine.protocol", "EngineClient", "refused with an explanation",
              "init_weight_transfer_engine(...)", "shutdown_weight_transfer_engine(...)",
              "start_weight_update(...)", "start_draft_weight_update(...)", "update_weights(...)",
              "finish_weight_update(...)", "update_weight_version(...)", "get_weight_version(...)",
              "compute_weight_checksums(...)", "handle_fault(...)", "get_status(...)",
              "scale_elastic_ep(...)", hook=Hook.OVERRIDDEN),
]  # fmt: skip

_CLIENT, _CORE = "vllm.v1.engine.async_llm", "vllm.v1.engine.core"
_OUTPUT, _STATS = "vllm.v1.engine.output_processor", "vllm.v1.metrics.stats"

_ENGINE = [
    Entry("engine", "vllm.platforms", "current_platform", NameKind.VALUE, "kernels for forks"),
    *_methods("engine", "vllm.platforms.interface", "Platform", "kernels for forks",
              "register_triton_kernel_overrides()", hook=Hook.REPLACED),
    *_classes("engine", "vllm.v1.engine", "messages of the engine core",
              "EngineCoreOutput(request_id=, new_token_ids=, new_logprobs=, finish_reason=, "
              "stop_reason=, prefill_stats=)",
              "EngineCoreRequest", "FinishReason"),
    *_attributes("engine", "vllm.v1.engine", "FinishReason", "end of a request", "STOP LENGTH"),
    *_attributes("engine", "vllm.v1.engine", "EngineCoreRequest", "the two legs of a request",
                 "request_id external_req_id prompt_token_ids sampling_params cache_salt "
                 "reasoning_ended reasoning_parser_kwargs", Hook.SET),
    *_attributes("engine", "vllm.v1.engine", "EngineCoreRequest", "the two legs of a request",
                 "prompt_embeds"),
    *_classes("engine", _CLIENT, "client of an instance", "AsyncLLM"),
    *_methods("engine", _CLIENT, "AsyncLLM", "client of an instance",
              "generate(prompt, sampling_params, request_id, prompt_text=, lora_request=, "
              "tokenization_kwargs=, trace_headers=, priority=, data_parallel_rank=, "
              "reasoning_ended=)",
              "encode(prompt, pooling_params, request_id, lora_request=, trace_headers=, "
              "priority=, tokenization_kwargs=)",
              "abort(request_id, internal=)", "shutdown(timeout=)", "get_num_unfinished_requests()",
              "get_supported_tasks()", "is_paused()", "is_sleeping()",
              "start_profile(profile_prefix)", "stop_profile()", "reset_mm_cache()",
              "reset_encoder_cache()",
              "reset_prefix_cache(reset_running_requests, reset_connector)", "sleep(level, mode)",
              "release_kv_cache_memory()", "wake_up(tags)", "add_lora(lora_request)",
              "pause_generation(mode=, clear_cache=)", "resume_generation()",
              "collective_rpc(method, timeout, args, kwargs)"),
    *_methods("engine", _CLIENT, "AsyncLLM", "sends prepared legs",
              "check_admission(request_id=)", "_run_output_handler()"),
    *_attributes("engine", _CLIENT, "AsyncLLM", "parts of a client",
                 "engine_core output_processor logger_manager vllm_config errored"),
    *_classes("engine", "vllm.v1.engine.exceptions", "death of an engine core",
              "EngineDeadError()", "EngineGenerateError"),
    *_methods("engine", "vllm.v1.engine.core_client", "AsyncMPClient", "talks to an engine core",
              "_ensure_output_queue_task()", "add_request_async(request)",
              "call_utility_async(method, ...)"),
    *_attributes("engine", "vllm.v1.engine.core_client", "AsyncMPClient",
                 "ends requests of a dead engine", "resources"),
    *_attributes("engine", "vllm.v1.engine.core_client", "BackgroundResources",
                 "ends requests of a dead engine", "engine_dead", Hook.SET),
    *_classes("engine", _OUTPUT, "collects a leg's outputs",
              "RequestOutputCollector(output_kind, request_id)"),
    *_methods("engine", _OUTPUT, "RequestOutputCollector", "an error waits behind an output",
              "put(output)", "get()", "get_nowait()", hook=Hook.OVERRIDDEN),
    *_attributes("engine", _OUTPUT, "RequestOutputCollector", "an error waits behind an output",
                 "output", Hook.SET),
    *_attributes("engine", _OUTPUT, "RequestOutputCollector", "who waits for others is told",
                 "ready"),
    *_methods("engine", _OUTPUT, "OutputProcessor", "front-end states of requests",
              "add_request(request, prompt, parent_req, request_index, queue)",
              "process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)",
              "propagate_error(e)"),
    *_attributes("engine", _OUTPUT, "OutputProcessor", "front-end states of requests",
                 "request_states external_req_ids"),
    *_methods("engine", _OUTPUT, "RequestState", "when the first token was there",
              "make_request_output(new_token_ids, ...)", hook=Hook.WRAPPED),
    *_attributes("engine", _OUTPUT, "RequestState", "a request goes on elsewhere",
                 "request_id external_req_id detokenizer"),
    *_attributes("engine", _OUTPUT, "RequestState", "a request goes on elsewhere",
                 "queue remote_prefill_cached_tokens num_cache_creation_tokens stats",
                 Hook.SET),
    *_attributes("engine", "vllm.v1.engine.detokenizer", "IncrementalDetokenizer",
                 "tokens put out so far", "output_token_ids"),
    *_classes("engine", _CORE, "engine core of an instance", "EngineCore", "EngineCoreProc",
              "EngineShutdownState"),
    *_attributes("engine", _CORE, "EngineShutdownState", "end of an engine core", "RUNNING"),
    *_methods("engine", _CORE, "EngineCoreProc", "engine core of an instance",
              "run_engine_core(vllm_config=, local_client=, handshake_address=, executor_class=, "
              "log_stats=)",
              "_send_engine_dead()", "has_work()"),
    *_methods("engine", _CORE, "EngineCoreProc", "an engine core ends as a death does",
              "_handle_shutdown()", "_reject_add_in_shutdown(request)", hook=Hook.REPLACED),
    *_methods("engine", _CORE, "EngineCoreProc", "an emulated clock stands still while idle",
              "_process_input_queue()", hook=Hook.WRAPPED),
    *_attributes("engine", _CORE, "EngineCoreProc", "end of an engine core", "shutdown_state"),
    *_attributes("engine", _CORE, "EngineCore", "utilities of an engine core", "scheduler"),
    *_methods("engine", _CORE, "EngineCore", "a request brings output along",
              "preprocess_add_request(request)", hook=Hook.WRAPPED),
    *_attributes("engine", _CORE, "EngineCore", "a request brings output along",
                 "structured_output_manager"),
    *_methods("engine", "vllm.v1.request", "Request", "a request brings output along",
              "append_output_token_ids(token_ids)"),
    *_attributes("engine", "vllm.v1.request", "Request", "a request brings output along",
                 "use_structured_output structured_output_request"),
    *_attributes("engine", "vllm.v1.request", "Request", "a request brings output along",
                 "prefill_stats", Hook.SET),
    *_methods("engine", "vllm.v1.structured_output", "StructuredOutputManager",
              "a request brings output along", "accept_tokens(request, new_token_ids)"),
    *_attributes("engine", "vllm.v1.structured_output.request", "StructuredOutputRequest",
                 "a request brings output along", "_grammar"),
    *_attributes("engine", "vllm.v1.structured_output.request", "StructuredOutputRequest",
                 "a grammar that does not allow its output", "grammar", Hook.SET),
    *_classes("engine", "vllm.v1.outputs", "logprobs of a token that prefill sampled",
              "LogprobsLists(logprob_token_ids, logprobs, sampled_token_ranks)"),
    *_classes("engine", "vllm.v1.engine.utils", "start of an engine core",
              "EngineHandshakeMetadata(addresses=, parallel_config=)",
              "EngineZmqAddresses(inputs=, outputs=)"),
    *_classes("engine", "vllm.v1.executor", "start of an engine core", "Executor"),
    *_methods("engine", "vllm.v1.executor", "Executor", "start of an engine core",
              "get_class(vllm_config)"),
    *_classes("engine", "vllm.v1.metrics.loggers", "metrics of all instances in one logger",
              "PrometheusStatLogger(vllm_config, engine_indexes)"),
    *_methods("engine", "vllm.v1.metrics.loggers", "PrometheusStatLogger",
              "metrics of all instances in one logger",
              "record(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)",
              "log_engine_initialized()", "log()", "record_sleep_state(sleep, level)",
              "record_admission_rejection(reason)", hook=Hook.OVERRIDDEN),
    *_methods("engine", "vllm.v1.metrics.loggers", "StatLoggerManager",
              "counts a token that prefill sampled", "record(scheduler_stats=, iteration_stats=)"),
    *_classes("engine", _STATS, "statistics of steps", "IterationStats()", "MultiModalCacheStats",
              "PrefillStats(num_prompt_tokens=, num_cached_tokens=, num_computed_tokens=)",
              "RequestStateStats(arrival_time=)", "SchedulerStats"),
    *_methods("engine", _STATS, "IterationStats", "metrics of requests by their legs",
              "update_from_output(output, engine_core_timestamp, is_prefilling, req_stats, ...)",
              "update_from_finished_request(finish_reason=, request_id=, num_prompt_tokens=, "
              "max_tokens_param=, req_stats=, num_cached_tokens=)", hook=Hook.OVERRIDDEN),
    *_attributes("engine", _STATS, "IterationStats", "metrics of requests by their legs",
                 "prompt_token_stats finished_requests n_params_iter "
                 "max_num_generation_tokens_iter"),
    *_attributes("engine", _STATS, "IterationStats", "metrics of requests by their legs",
                 "num_generation_tokens num_preempted_reqs", Hook.SET),
    *_attributes("engine", _STATS, "PromptTokenStats", "metrics of requests by their legs",
                 "computed", Hook.SET),
    *_attributes("engine", _STATS, "RequestStateStats", "metrics of requests by their legs",
                 "scheduled_ts num_generation_tokens"),
    *_attributes("engine", _STATS, "RequestStateStats", "metrics of requests by their legs",
                 "queued_ts", Hook.SET),
    *_attributes("engine", _STATS, "FinishedRequestStats", "times of requests are never negative",
                 "queued_time prefill_time decode_time inference_time", Hook.SET),
    *_attributes("engine", _STATS, "SchedulerStats", "reports of instances",
                 "num_running_reqs num_waiting_reqs num_skipped_waiting_reqs kv_cache_usage "
                 "kv_connector_stats"),
    *_modules("engine", "imported before engine cores are forked", "vllm.v1.engine.core",
              "vllm.v1.executor.uniproc_executor", "vllm.v1.worker.cpu_model_runner",
              "vllm.v1.worker.cpu_worker", "vllm.v1.attention.backends.cpu_attn",
              "vllm.model_executor.models.llama"),
]  # fmt: skip

_SCHED, _POOL = "vllm.v1.core.sched.scheduler", "vllm.v1.core.block_pool"

_SCHEDULER = [
    *_classes("scheduler", _SCHED, "base of our schedulers", "Scheduler(vllm_config, ...)"),
    *_classes("scheduler", "vllm.v1.core.sched.async_scheduler", "base of our schedulers",
              "AsyncScheduler(vllm_config, ...)"),
    *_methods("scheduler", _SCHED, "Scheduler", "steps of our schedulers", "schedule(...)",
              "update_from_output(scheduler_output, model_runner_output)", hook=Hook.OVERRIDDEN),
    *_methods("scheduler", _SCHED, "Scheduler", "requests start over when KV is lost",
              "_preempt_request(request, timestamp, drop_stale_output=)"),
    *_methods("scheduler", _SCHED, "Scheduler", "steps end where states are saved; lost blocks",
              "_mamba_block_aligned_split(request, num_new_tokens, "
              "num_new_local_computed_tokens, num_external_computed_tokens)",
              "_handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)",
              "__init__(vllm_config, kv_cache_config, ...)", hook=Hook.REPLACED),
    *_attributes("scheduler", _SCHED, "Scheduler", "steps end where states are saved",
                 "need_mamba_block_aligned_split", Hook.SET),
    *_attributes("scheduler", _SCHED, "Scheduler", "steps end where states are saved", "connector"),
    *_attributes("scheduler", "vllm.v1.request", "Request", "lost blocks", "num_computed_tokens",
                 Hook.SET),
    *_methods("scheduler", "vllm.v1.core.kv_cache_manager", "KVCacheManager", "lost blocks",
              "get_block_ids(request_id)"),
    *_attributes("scheduler", _SCHED, "Scheduler", "requests and pool of a scheduler",
                 "vllm_config running requests cache_config kv_cache_config kv_cache_manager "
                 "prev_step_scheduled_req_ids deferred_frees"),
    *_attributes("scheduler", _SCHED, "Scheduler", "order of waiting requests", "waiting",
                 Hook.REPLACED),
    *_attributes("scheduler", _SCHED, "Scheduler", "budgets of a role",
                 "max_num_scheduled_tokens max_num_active_reqs", Hook.SET),
    _entry("scheduler", "vllm.v1.core.sched.request_queue", NameKind.CLASS, "RequestQueue",
           "order of waiting requests", Hook.IMPLEMENTED),
    *_methods("scheduler", "vllm.v1.core.sched.request_queue", "RequestQueue",
              "order of waiting requests", "add_request(request)", "pop_request()",
              "peek_request()", "prepend_request(request)", "prepend_requests(requests)",
              "remove_request(request)", "remove_requests(requests)", "__bool__()", "__len__()",
              "__iter__()", hook=Hook.OVERRIDDEN),
    *_classes("scheduler", "vllm.v1.core.sched.request_queue", "refuses priorities",
              "SchedulingPolicy"),
    *_attributes("scheduler", "vllm.v1.core.sched.request_queue", "SchedulingPolicy",
                 "refuses priorities", "PRIORITY"),
    *_classes("scheduler", "vllm.v1.core.sched.output",
              "what a step computes; an attribute of ours is attached", "SchedulerOutput"),
    *_attributes("scheduler", "vllm.v1.core.sched.output", "SchedulerOutput",
                 "what a step computes",
                 "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens "
                 "kv_connector_metadata kv_connector_block_state"),
    *_attributes("scheduler", "vllm.v1.core.sched.output", "NewRequestData",
                 "what a step computes", "req_id num_computed_tokens"),
    *_attributes("scheduler", "vllm.v1.core.sched.output", "CachedRequestData",
                 "what a step computes", "req_ids num_computed_tokens"),
    *_classes("scheduler", "vllm.v1.outputs",
              "output of a step; an attribute of ours is attached", "ModelRunnerOutput"),
    *_methods("scheduler", "vllm.v1.core.kv_cache_manager", "KVCacheManager",
              "prefix cache of an engine", "prefix_cache_lookup_enabled(request)"),
    *_attributes("scheduler", "vllm.v1.core.kv_cache_manager", "KVCacheManager",
                 "pool and prefix cache of an engine", "block_pool coordinator"),
    *_methods("scheduler", "vllm.v1.core.kv_cache_coordinator", "KVCacheCoordinator",
              "prefix cache of an engine",
              "find_longest_cache_hit(block_hashes, max_cache_hit_length)"),
    *_classes("scheduler", "vllm.v1.core.kv_cache_utils", "a pool grows",
              "KVCacheBlock(block_id, pool=)"),
    *_attributes("scheduler", "vllm.v1.core.kv_cache_utils", "KVCacheBlock",
                 "a pool shrinks", "block_id ref_cnt"),
    *_methods("scheduler", _POOL, "BlockPool", "a pool shrinks; KV is lost",
              "_maybe_evict_cached_block(block)", "touch(blocks)", "free_blocks(ordered_blocks)",
              "evict_blocks(block_ids)", "get_num_free_blocks()"),
    *_attributes("scheduler", _POOL, "BlockPool", "a pool grows and shrinks",
                 "blocks free_block_queue"),
    *_attributes("scheduler", _POOL, "BlockPool", "a pool grows and shrinks", "num_gpu_blocks",
                 Hook.SET),
    *_methods("scheduler", "vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue",
              "a pool grows and shrinks", "append_n(blocks)", "remove(block)"),
    *_attributes("scheduler", "vllm.v1.kv_cache_interface", "KVCacheConfig",
                 "a pool grows and shrinks", "num_blocks", Hook.SET),
    *_classes("scheduler", "vllm.v1.request", "requests of a scheduler", "Request"),
    *_attributes("scheduler", "vllm.v1.request", "Request", "requests of a scheduler",
                 "request_id arrival_time num_tokens num_prompt_tokens num_output_tokens "
                 "num_preemptions num_computed_tokens all_token_ids prompt_embeds block_hashes "
                 "cache_salt kv_transfer_params skip_reading_prefix_cache"),
]  # fmt: skip

_KV_UTILS, _KV_SPEC = "vllm.v1.core.kv_cache_utils", "vllm.v1.kv_cache_interface"

_KV_CACHE = [
    *_functions("kv_cache", "vllm.utils.hashing", "keys of blocks in the store",
                "get_hash_fn_by_name(hash_fn_name)"),
    *_functions("kv_cache", _KV_UTILS, "keys of blocks in the store",
                "generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, "
                "start_mm_idx)",
                "get_request_block_hasher(hash_block_size, caching_hash_fn)",
                "hash_block_tokens(hash_function, parent_block_hash, curr_block_token_ids, "
                "extra_keys)",
                "init_none_hash(hash_fn)"),
    *_classes("kv_cache", "vllm.v1.request", "keys of blocks in the store", "Request"),
    *_methods("kv_cache", "vllm.v1.request", "Request", "keys of blocks in the store",
              "from_engine_core_request(request, block_hasher)", "update_block_hashes()"),
    *_attributes("kv_cache", "vllm.v1.request", "Request", "keys of blocks where states are kept",
                 "_block_hasher block_hashes", Hook.SET),
    *_classes("kv_cache", "vllm.v1.core.kv_cache_manager", "blocks of a request",
              "KVCacheBlocks"),
    *_methods("kv_cache", "vllm.v1.core.kv_cache_manager", "KVCacheBlocks", "blocks of a request",
              "get_block_ids()"),
    *_classes("kv_cache", _KV_SPEC, "shape of the KV cache", "FullAttentionSpec", "KVCacheConfig",
              "MLAAttentionSpec", "MambaSpec"),
    *_attributes("kv_cache", _KV_SPEC, "KVCacheConfig", "shape of the KV cache",
                 "kv_cache_groups kv_cache_layout kv_cache_tensors num_blocks"),
    *_attributes("kv_cache", _KV_SPEC, "KVCacheTensor", "memory that layers share",
                 "layers offset layer_stride block_stride"),
    *_attributes("kv_cache", _KV_SPEC, "MambaSpec", "states beside the KV cache",
                 "mamba_cache_mode num_speculative_blocks mamba_type shapes dtypes "
                 "page_size_bytes"),
    *_attributes("kv_cache", _KV_SPEC, "KVCacheGroupSpec", "shape of the KV cache",
                 "layer_names kv_cache_spec"),
    *_attributes("kv_cache", _KV_SPEC, "FullAttentionSpec", "shape of the KV cache",
                 "block_size num_kv_heads head_size dtype page_size_bytes"),
    Entry("kv_cache", "vllm", "_custom_ops", NameKind.MODULE, "copies of blocks on a GPU"),
    *_functions("kv_cache", "vllm._custom_ops", "copies of blocks on a GPU",
                "swap_blocks_batch(src_ptrs, dst_ptrs, sizes)"),
    *_attributes("kv_cache", "vllm.model_executor.layers.attention.mla_attention", "MLAAttention",
                 "layout of latents",
                 "impl kv_lora_rank qk_rope_head_dim kv_cache_dtype"),
    *_methods("kv_cache", "vllm.v1.attention.backend", "MLAAttentionImpl", "layout of latents",
              "do_kv_cache_update(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, "
              "k_scale)"),
    *_functions("kv_cache", "vllm.v1.attention.backends.cpu_attn", "layout of K on CPU",
                "_get_attn_isa(dtype, block_size, head_size)"),
]  # fmt: skip

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"

_KV_CONNECTOR = [
    *_functions("kv_connector", "vllm.distributed.kv_transfer", "the connector of a worker",
                "get_kv_transfer_group()", "has_kv_transfer_group()"),
    *_functions("kv_connector", "vllm.distributed.parallel_state", "a worker's part of a slot",
                "get_tensor_model_parallel_rank()"),
    _entry("kv_connector", _BASE, NameKind.CLASS,
           "KVConnectorBase_V1(vllm_config, role, kv_cache_config)",
           "base of the store's connector", Hook.IMPLEMENTED),
    _entry("kv_connector", _BASE, NameKind.CLASS, "SupportsHMA",
           "base of the connector for models that keep states", Hook.IMPLEMENTED),
    *_methods("kv_connector", _BASE, "SupportsHMA", "models that keep states",
              "request_finished_all_groups(request, block_ids)", hook=Hook.OVERRIDDEN),
    *_classes("kv_connector", _BASE, "sides of the connector", "KVConnectorRole"),
    *_attributes("kv_connector", _BASE, "KVConnectorRole", "sides of the connector",
                 "SCHEDULER WORKER"),
    _entry("kv_connector", _BASE, NameKind.CLASS, "KVConnectorMetadata", "copies of a step",
           Hook.IMPLEMENTED),
    _entry("kv_connector", _BASE, NameKind.CLASS, "KVConnectorWorkerMetadata", "ended copies",
           Hook.IMPLEMENTED),
    *_methods("kv_connector", _BASE, "KVConnectorWorkerMetadata", "ended copies",
              "aggregate(other)", hook=Hook.OVERRIDDEN),
    *_attributes("kv_connector", _BASE, "KVConnectorBase_V1", "layers of the KV cache",
                 "_kv_cache_config"),
    *_methods("kv_connector", _BASE, "KVConnectorBase_V1", "copies of the step under way",
              "_get_connector_metadata()", "has_connector_metadata()"),
    *_attributes("kv_connector", _BASE, "KVConnectorBase_V1", "a dropped save is a miss later",
                 "requires_kv_delivery", Hook.OVERRIDDEN),
    *_methods("kv_connector", _BASE, "KVConnectorBase_V1", "KV of which heads can move",
              "get_required_kvcache_layout(vllm_config)", hook=Hook.OVERRIDDEN),
    *_methods("kv_connector", _BASE, "KVConnectorBase_V1", "hooks of the store's connector",
              "requires_piecewise_for_cudagraph(extra_config)",
              "get_num_new_matched_tokens(request, num_computed_tokens)",
              "update_state_after_alloc(request, blocks, num_external_tokens)",
              "build_connector_meta(scheduler_output)",
              "update_connector_output(connector_output)",
              "request_finished(request, block_ids)",
              "register_kv_caches(kv_caches)",
              "bind_connector_metadata(connector_metadata)",
              "start_load_kv(forward_context, ...)",
              "wait_for_layer_load(layer_name)",
              "save_kv_layer(layer_name, kv_layer, attn_metadata, ...)",
              "wait_for_save()",
              "get_block_ids_with_load_errors()",
              "build_connector_worker_meta()",
              "get_kv_connector_stats()",
              "build_kv_connector_stats(data)",
              "reset_cache()",
              "shutdown()",
              hook=Hook.OVERRIDDEN),
    _entry("kv_connector", _METRICS, NameKind.CLASS, "KVConnectorStats(data=)",
           "counts of copies in vLLM's reports", Hook.IMPLEMENTED),
    *_methods("kv_connector", _METRICS, "KVConnectorStats", "counts of copies in vLLM's reports",
              "reset()", "aggregate(other)", "reduce()", "is_empty()", hook=Hook.OVERRIDDEN),
    *_classes("kv_connector", "vllm.v1.outputs", "ended copies", "KVConnectorOutput"),
    *_attributes("kv_connector", "vllm.v1.outputs", "KVConnectorOutput", "ended copies",
                 "kv_connector_worker_meta"),
    *_methods("kv_connector", "vllm.v1.core.sched.output", "KVConnectorBlockState",
              "blocks that a step saves", "get_block_ids(req_id)"),
]  # fmt: skip

_LAYER = "vllm.model_executor.layers.attention"
_CPU_ATTENTION = "vllm.v1.attention.backends.cpu_attn"
_BACKEND = "vllm.v1.attention.backend"

_ATTENTION = [
    *_classes("attention", "vllm.forward_context", "a step in parts",
              "ForwardContext(attn_metadata=, slot_mapping=, is_padding=, ...)"),
    *_functions("attention", "vllm.forward_context", "context of a forward pass",
                "get_forward_context()", "override_forward_context(forward_context)",
                "set_forward_context(attn_metadata, vllm_config, num_tokens=, slot_mapping=)"),
    *_functions("attention", "vllm.utils.torch_utils", "modules in the model's type",
                "set_default_torch_dtype(dtype)"),
    *_classes("attention", _BACKEND, "a batch, which guests rebuild from its fields",
              "CommonAttentionMetadata(query_start_loc=, query_start_loc_cpu=, seq_lens=, "
              "num_reqs=, num_actual_tokens=, max_query_len=, max_seq_len=, block_table_tensor=, "
              "slot_mapping=, causal=)"),
    *_classes("attention", "vllm.v1.worker.ubatch_utils", "a step in parts",
              "UBatchSlice(request_slice, token_slice)"),
    *_functions("attention", "vllm.v1.worker.ubatch_utils", "a step in parts",
                "split_attn_metadata(ubatch_slices, common_attn_metadata)"),
    *_classes("attention", _LAYER, "heads of a layer in a guest",
              "Attention(num_heads, head_size, scale, num_kv_heads=, cache_config=, "
              "logits_soft_cap=, per_layer_sliding_window=, prefix=)"),
    *_methods("attention", _LAYER, "Attention", "attention with another KV cache",
              "process_weights_after_loading(act_dtype)", "get_kv_cache_spec(vllm_config)",
              "get_attn_backend()", "bind_kv_cache(kv_cache)"),
    *_attributes("attention", _LAYER, "Attention", "shape of an attention",
                 "num_heads num_kv_heads head_size head_size_v kv_cache kv_cache_dtype "
                 "attn_backend"),
    *_attributes("attention", _LAYER, "Attention", "attention of a layer in several places",
                 "impl", Hook.REPLACED),
    *_methods("attention", _BACKEND, "AttentionBackend", "metadata of a batch",
              "get_builder_cls()", "get_name()"),
    *_attributes("attention", _BACKEND, "AttentionBackend", "who writes new keys and values",
                 "forward_includes_kv_cache_update"),
    *_methods("attention", _BACKEND, "AttentionMetadataBuilder",
              "metadata of a batch; guests are told of it",
              "build(common_prefix_len, common_attn_metadata, ...)", hook=Hook.WRAPPED),
    *_classes("attention", _BACKEND, "metadata of a batch",
              "AttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)"),
    *_classes("attention", _CPU_ATTENTION, "some heads of a layer on CPU",
              "CPUAttentionMetadataBuilder(kv_cache_spec, layer_names, vllm_config, device)",
              "CPUAttentionBackendImpl(num_heads, head_size, scale, num_kv_heads, alibi_slopes, "
              "sliding_window, kv_cache_dtype, logits_soft_cap)"),
    *_attributes("attention", _CPU_ATTENTION, "CPUAttentionMetadataBuilder",
                 "some heads of a layer on CPU", "isa num_heads", Hook.SET),
    *_methods("attention", _CPU_ATTENTION, "CPUAttentionBackendImpl",
              "attention of a layer in several places",
              "forward(layer, query, key, value, kv_cache, attn_metadata, output, ...)",
              "do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)",
              hook=Hook.REPLACED),
    *_attributes("attention", _CPU_ATTENTION, "CPUAttentionBackendImpl",
                 "what an attention cannot be split with",
                 "scale sliding_window kv_cache_dtype logits_soft_cap alibi_slopes sinks"),
    *_attributes("attention", _CPU_ATTENTION, "CPUAttentionMetadata",
                 "a batch for our kernels",
                 "causal block_table query_start_loc seq_lens max_seq_len num_actual_tokens"),
]  # fmt: skip

_STATE = "vllm.distributed.parallel_state"

_MODEL = [
    *_functions("model", "vllm.forward_context", "a compiled model calls its layers",
                "get_forward_context()"),
    *_attributes("model", "vllm.forward_context", "ForwardContext",
                 "a compiled model calls its layers", "skip_compiled", Hook.SET),
    *_functions("model", "vllm.model_executor.model_loader", "weights of a guest's layers",
                "get_model_loader(load_config)"),
    *_methods("model", "vllm.model_executor.model_loader.base_loader", "BaseModelLoader",
              "weights of a guest's layers", "load_weights(model, model_config)"),
    *_functions("model", "vllm.model_executor.model_loader.utils", "layers of a guest",
                "initialize_model(vllm_config)",
                "process_weights_after_loading(model, model_config, target_device)"),
    *_classes("model", "vllm.model_executor.models.utils", "layers that a guest lacks",
              "PPMissingLayer"),
    Entry("model", "vllm.distributed", "parallel_state", NameKind.MODULE,
          "process groups of a guest"),
    *_modules("model", "process groups of a guest", "vllm.distributed.utils"),
    *_modules("model", "layers that a guest lacks", "vllm.model_executor.models.utils"),
    _entry("model", "vllm.model_executor.models.utils", NameKind.VALUE,
           "_model_to_pp_missing_layer_names", "a guest that builds other layers than before",
           Hook.REPLACED),
    _entry("model", "vllm.distributed.utils", NameKind.FUNCTION, "get_pp_indices(...)",
           "a guest is a pipeline stage with any range of layers", Hook.REPLACED),
    _entry("model", _STATE, NameKind.VALUE, "_PP",
           "a guest is a pipeline stage with any range of layers", Hook.REPLACED),
    *_functions("model", _STATE, "process groups of a guest",
                "init_distributed_environment(world_size, rank, distributed_init_method, "
                "local_rank, backend)",
                "initialize_model_parallel(tensor_model_parallel_size, "
                "pipeline_model_parallel_size)",
                "destroy_model_parallel()", "destroy_distributed_environment()",
                "set_custom_all_reduce(enable)"),
    *_functions("model", _STATE, "what the ranks of an engine agree on", "get_tp_group()"),
    *_attributes("model", _STATE, "GroupCoordinator", "what the ranks of an engine agree on",
                 "cpu_group world_size"),
]  # fmt: skip

_MOE = "vllm.model_executor.layers.fused_moe"
_ROUTED = f"{_MOE}.routed_experts"

_EXPERTS = [
    *_classes("experts", _ROUTED, "experts of a layer in several places", "RoutedExperts"),
    *_methods("experts", _ROUTED, "RoutedExperts", "experts of a layer in several places",
              "forward_modular(x=, topk_weights=, topk_ids=, shared_experts=, "
              "shared_experts_input=)", hook=Hook.REPLACED),
    *_attributes("experts", _ROUTED, "RoutedExperts", "what experts cannot be split with",
                 "quant_method expert_map"),
    *_attributes("experts", _ROUTED, "RoutedExperts", "some experts alone",
                 "global_num_experts local_num_experts", Hook.SET),
    *_classes("experts", f"{_MOE}.unquantized_fused_moe_method", "experts with weights alone",
              "UnquantizedFusedMoEMethod"),
    *_methods("experts", f"{_MOE}.unquantized_fused_moe_method", "UnquantizedFusedMoEMethod",
              "some experts alone",
              "apply(layer=, x=, topk_weights=, topk_ids=, shared_experts=, "
              "shared_experts_input=)"),
    *_attributes("experts", f"{_MOE}.fused_moe_method_base", "FusedMoEMethodBase",
                 "what experts cannot be split with", "is_monolithic"),
    *_classes("experts", f"{_MOE}.runner.shared_experts", "shared experts beside routed ones",
              "SharedExpertsOrder"),
    *_methods("experts", f"{_MOE}.runner.shared_experts", "SharedExperts",
              "shared experts on another stream, before a break in a graph",
              "_determine_shared_experts_order(hidden_states)"),
    *_methods("experts", f"{_MOE}.runner.shared_experts", "SharedExperts",
              "shared experts on another stream, before a break in a graph", "wait()",
              hook=Hook.REPLACED),
    *_attributes("experts", f"{_MOE}.runner.shared_experts", "SharedExpertsOrder",
                 "shared experts beside routed ones",
                 "MK_INTERNAL_OVERLAPPED MULTI_STREAM_OVERLAPPED"),
]  # fmt: skip

_GPU_RUNNER = "vllm.v1.worker.gpu_model_runner"
_SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"

_RUNNER = [
    *_classes("runner_hooks", "vllm.distributed.device_communicators.shm_broadcast",
              "ranks on CPU sleep between steps", "SpinCondition"),
    *_methods("runner_hooks", "vllm.distributed.device_communicators.shm_broadcast",
              "SpinCondition", "ranks on CPU sleep between steps",
              "__init__(is_reader, context, notify_address, busy_loop_s)", hook=Hook.WRAPPED),
    *_classes("runner_hooks", "vllm.v1.worker.worker_base", "workers in processes of their own",
              "WorkerWrapperBase"),
    *_methods("runner_hooks", "vllm.v1.worker.worker_base", "WorkerWrapperBase",
              "workers in processes of their own do what ours does", "init_device()",
              hook=Hook.WRAPPED),
    *_classes("runner_hooks", "vllm.v1.worker.cpu_model_runner", "steps on CPU",
              "CPUModelRunner"),
    *_classes("runner_hooks", _GPU_RUNNER, "steps on a GPU", "GPUModelRunner"),
    *_classes("runner_hooks", _SECOND_RUNNER, "steps on a GPU", "GPUModelRunner"),
    Entry("runner_hooks", "vllm.v1.worker.gpu", "model_runner", NameKind.MODULE,
          "the KV cache gets slabs of its own"),
    _entry("runner_hooks", _SECOND_RUNNER, NameKind.FUNCTION, "init_kv_cache(...)",
           "the KV cache gets slabs of its own", Hook.WRAPPED),
    *_methods("runner_hooks", _SECOND_RUNNER, "GPUModelRunner",
              "the KV cache gets slabs of its own",
              "initialize_kv_cache(kv_cache_config, is_profiling=, ...)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", _SECOND_RUNNER, "GPUModelRunner", "steps that lost KV",
              "execute_model(scheduler_output, ...)", "sample_tokens(grammar_output, ...)",
              hook=Hook.WRAPPED),
    *_methods("runner_hooks", _SECOND_RUNNER, "GPUModelRunner", "layers of the model",
              "get_model()"),
    *_attributes("runner_hooks", _SECOND_RUNNER, "GPUModelRunner",
                 "layers and memory of a runner",
                 "vllm_config cache_config kv_cache_config attn_groups kv_caches device"),
    *_methods("runner_hooks", "vllm.v1.worker.cpu_model_runner", "CPUModelRunner",
              "steps that lost KV; emulated time", "execute_model(scheduler_output, ...)",
              "sample_tokens(grammar_output, ...)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", "vllm.v1.worker.cpu_model_runner", "CPUModelRunner",
              "the KV cache gets slabs of its own", "initialize_kv_cache_tensors(...)",
              "initialize_kv_cache(...)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", "vllm.v1.worker.cpu_model_runner", "CPUModelRunner",
              "seeds with chunked prefill on CPU", "_sample(...)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "a request brings output along",
              "_update_states(scheduler_output)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", "vllm.v1.worker.gpu_input_batch", "InputBatch",
              "a request brings output along", "add_request(request)", hook=Hook.WRAPPED),
    *_attributes("runner_hooks", "vllm.v1.worker.gpu_input_batch", "InputBatch",
                 "a request brings output along", "vocab_size"),
    *_attributes("runner_hooks", "vllm.v1.worker.gpu_input_batch", "CachedRequestState",
                 "a request brings output along", "output_token_ids", Hook.SET),
    *_methods("runner_hooks", "vllm.v1.worker.cpu_model_runner", "CPUModelRunner",
              "compiles the model and no more", "warming_up_model()", hook=Hook.WRAPPED),
    *_methods("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "steps that lost KV",
              "execute_model(scheduler_output, ...)", "sample_tokens(grammar_output, ...)",
              hook=Hook.WRAPPED),
    *_methods("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "the KV cache gets slabs of its own",
              "initialize_kv_cache_tensors(...)", "initialize_kv_cache(...)", hook=Hook.WRAPPED),
    *_methods("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "layers of the model", "get_model()"),
    *_attributes("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "layers and memory of a runner",
                 "vllm_config cache_config kv_cache_config attn_groups kv_caches device dtype "
                 "max_num_tokens input_batch requests discard_request_mask kv_connector_output"),
    *_methods("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "seeds where KV could not be loaded",
              "_sample(...)", hook=Hook.WRAPPED),
    *_attributes("runner_hooks", "vllm.v1.outputs", "KVConnectorOutput",
                 "seeds where KV could not be loaded", "invalid_block_ids"),
    *_attributes("runner_hooks", "vllm.v1.worker.gpu_input_batch", "CachedRequestState",
                 "seeds where KV could not be loaded", "block_ids num_computed_tokens"),
    *_attributes("runner_hooks", _GPU_RUNNER, "GPUModelRunner", "a pipeline stage on CPU",
                 "intermediate_tensors", Hook.SET),
    *_attributes("runner_hooks", "vllm.v1.worker.gpu_input_batch", "InputBatch",
                 "seeds of requests", "generators num_reqs req_ids"),
    *_attributes("runner_hooks", "vllm.v1.worker.gpu_input_batch", "CachedRequestState",
                 "seeds with chunked prefill on CPU", "generator", Hook.SET),
    *_methods("runner_hooks", "vllm.v1.worker.utils", "AttentionGroup", "the metadata builder",
              "get_metadata_builder(ubatch_id)"),
    *_attributes("runner_hooks", "vllm.v1.worker.utils", "AttentionGroup", "shape of the KV cache",
                 "kv_cache_spec"),
    *_methods("runner_hooks", "vllm.v1.outputs", "AsyncModelRunnerOutput",
              "steps that lost KV", "get_output()", hook=Hook.WRAPPED),
    *_functions("runner_hooks", _STATE, "a pipeline stage on CPU", "get_pp_group()"),
    *_attributes("runner_hooks", _STATE, "GroupCoordinator", "a pipeline stage on CPU",
                 "is_first_rank"),
]  # fmt: skip

_BREAKABLE = "vllm.compilation.breakable_cudagraph"
_SECOND_GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils"
_GRAPHS = [
    *_functions("graphs", _BREAKABLE, "graphs of modules that may move",
                "is_breakable_cudagraph_enabled()"),
    *_classes("graphs", _BREAKABLE, "graphs of modules that may move",
              "BreakableCUDAGraphCapture", "BreakableCUDAGraphWrapper"),
    *_methods("graphs", _BREAKABLE, "BreakableCUDAGraphCapture", "breaks at what has moved",
              "current()", "add_eager(fn)"),
    *_methods("graphs", _BREAKABLE, "BreakableCUDAGraphCapture",
              "captures beside other threads", "_begin_segment()", hook=Hook.REPLACED),
    *_attributes("graphs", _BREAKABLE, "BreakableCUDAGraphCapture",
                 "captures beside other threads", "pool"),
    *_attributes("graphs", _BREAKABLE, "BreakableCUDAGraphCapture",
                 "captures beside other threads", "_current_graph _capturing", Hook.SET),
    *_attributes("graphs", _BREAKABLE, "BreakableCUDAGraphWrapper",
                 "graphs of the modules at home and of others", "entries", Hook.SET),
    *_attributes("graphs", _BREAKABLE, "BreakableCUDAGraphWrapper", "the first runner's model",
                 "runnable"),
    *_attributes("graphs", _BREAKABLE, "_BreakableEntry", "graphs that have been captured",
                 "capture"),
    Entry("graphs", "vllm.compilation", "monitor", NameKind.MODULE, "captures while it serves"),
    Entry("graphs", "vllm.v1.worker.gpu", "cudagraph_utils", NameKind.MODULE,
          "captures while it serves"),
    Entry("graphs", "vllm.compilation.monitor", "cudagraph_capturing_enabled", NameKind.VALUE,
          "captures while an engine serves"),
    *_functions("graphs", "vllm.compilation.monitor", "captures while an engine serves",
                "set_cudagraph_capturing_enabled(enabled)"),
    *_classes("graphs", "vllm.config", "whether a step runs a graph", "CUDAGraphMode"),
    *_classes("graphs", "vllm.forward_context", "a graph by its number of tokens",
              "BatchDescriptor(num_tokens)"),
    *_functions("graphs", "vllm.utils.torch_utils", "tensors of a graph",
                "weak_ref_tensor(tensor)"),
    *_functions("graphs", _STATE, "captures while an engine serves", "graph_capture(device=)"),
    *_attributes("graphs", _GPU_RUNNER, "GPUModelRunner", "graphs of the first runner",
                 "model cudagraph_dispatcher"),
    *_methods("graphs", _GPU_RUNNER, "GPUModelRunner", "graphs of the first runner",
              "_warmup_and_capture(desc, cudagraph_runtime_mode=)"),
    *_methods("graphs", "vllm.v1.cudagraph_dispatcher", "CudagraphDispatcher",
              "steps without a graph while none is captured", "dispatch(num_tokens, ...)",
              hook=Hook.WRAPPED),
    *_attributes("graphs", _SECOND_RUNNER, "GPUModelRunner", "graphs of the second runner",
                 "model cudagraph_manager model_state input_buffers intermediate_tensors "
                 "block_tables attn_groups kv_cache_config"),
    *_methods("graphs", _SECOND_GRAPHS, "CudaGraphManager",
              "steps without a graph while none is captured",
              "dispatch(num_reqs, num_tokens, ...)", hook=Hook.WRAPPED),
    *_attributes("graphs", _SECOND_GRAPHS, "CudaGraphManager", "graphs of the second runner",
                 "breakable_cg_runner"),
    *_attributes("graphs", _SECOND_GRAPHS, "CudaGraphManager", "one graph at a time",
                 "_capture_descs", Hook.SET),
    *_methods("graphs", _SECOND_GRAPHS, "ModelCudaGraphManager", "one graph at a time",
              "capture(model, model_state, input_buffers, intermediate_tensors, block_tables, "
              "attn_groups, kv_cache_config)"),
    *_attributes("graphs", _SECOND_GRAPHS, "BatchExecutionDescriptor",
                 "steps without a graph while none is captured", "cg_mode num_tokens num_reqs"),
    _entry("graphs", _SECOND_GRAPHS, NameKind.FUNCTION, "prepare_inputs_to_capture(...)",
           "captures ask no guest", Hook.REPLACED),
    *_classes("graphs", _SECOND_GRAPHS, "captures ask no guest",
              "AttentionState(attn_metadata, slot_mappings)"),
    *_attributes("graphs", _SECOND_GRAPHS, "AttentionState", "captures ask no guest",
                 "slot_mappings"),
    Entry("graphs", _SECOND_GRAPHS, "tqdm", NameKind.VALUE, "captures without a progress bar",
          None, Hook.REPLACED),
]  # fmt: skip

_OFFLINE = [
    Entry("offline", "vllm", "LLM", NameKind.CLASS, "engines of benchmarks"),
    Entry("offline", "vllm", "SamplingParams", NameKind.CLASS, "engines of benchmarks"),
    *_methods("offline", "vllm", "LLM", "engines of benchmarks",
              "generate(prompts, sampling_params, use_tqdm=)", "collective_rpc(method, args=)"),
    *_attributes("offline", "vllm", "LLM", "engines of benchmarks", "llm_engine"),
    *_classes("offline", "vllm.engine.arg_utils", "engines of benchmarks", "EngineArgs"),
    *_modules("offline", "vLLM's own server, started for comparisons",
              "vllm.entrypoints.openai.api_server"),
    *_methods("offline", "vllm.engine.arg_utils", "EngineArgs", "engines of benchmarks",
              "create_engine_config()"),
    *_methods("offline", "vllm.v1.engine.llm_engine", "LLMEngine", "engines of benchmarks",
              "add_request(request_id, prompt, params)", "step()"),
    *_attributes("offline", "vllm.v1.engine.llm_engine", "LLMEngine", "engines of benchmarks",
                 "engine_core"),
    *_attributes("offline", "vllm.v1.engine.core_client", "InprocClient", "engines of benchmarks",
                 "engine_core"),
]  # fmt: skip

_CLIENTS = [
    Entry("clients", "vllm.v1.engine", "async_llm", NameKind.MODULE, "clients of instances"),
    *_classes("clients", _CLIENT, "client of an instance", "AsyncLLM"),
    *_methods("clients", _CLIENT, "AsyncLLM", "client of an instance",
              "from_vllm_config(vllm_config=, usage_context=, stat_loggers=, client_addresses=)"),
    *_methods("clients", _CLIENT, "AsyncLLM", "leaves a renderer to others", "shutdown(timeout)",
              hook=Hook.OVERRIDDEN),
    *_attributes("clients", _CLIENT, "AsyncLLM", "leaves a renderer to others", "renderer",
                 Hook.SET),
    _entry("clients", _CLIENT, NameKind.FUNCTION, "renderer_from_config(config)",
           "one renderer for all clients", Hook.REPLACED),
    *_classes("clients", _STATS, "metrics of requests by their legs", "IterationStats"),
    _entry("clients", _CLIENT, NameKind.CLASS, "IterationStats()",
           "metrics of requests by their legs", Hook.REPLACED),
    _entry("clients", _CLIENT, NameKind.FUNCTION, "load_stat_logger_plugin_factories()",
           "entry points are read once", Hook.REPLACED),
]  # fmt: skip

_NVML = [
    Entry("nvml", "vllm.third_party", "pynvml", NameKind.MODULE, "bindings of NVML"),
    *_functions("nvml", "vllm.third_party.pynvml", "use and memory of GPUs", "nvmlInit()",
                "nvmlDeviceGetHandleByIndex(index)", "nvmlDeviceGetHandleByUUID(uuid)",
                "nvmlDeviceGetUtilizationRates(handle)", "nvmlDeviceGetMemoryInfo(handle)"),
    *_classes("nvml", "vllm.third_party.pynvml", "use and memory of GPUs", "NVMLError"),
]  # fmt: skip

_STRUCTURED = "vllm.v1.structured_output"
_GRAMMARS = [
    _entry("grammars", _CORE, NameKind.CLASS, "StructuredOutputManager",
           "a backend for each request's grammar", Hook.REPLACED),
    Entry("grammars", "vllm.v1.engine", "core", NameKind.MODULE, "a backend for each request"),
    *_classes("grammars", _STRUCTURED, "a backend for each request's grammar",
              "StructuredOutputManager(vllm_config)"),
    *_methods("grammars", _STRUCTURED, "StructuredOutputManager",
              "a backend for each request's grammar", "grammar_init(request)",
              "_create_grammar(request)", "clear_backend()", hook=Hook.OVERRIDDEN),
    *_attributes("grammars", _STRUCTURED, "StructuredOutputManager",
                 "a backend for each request's grammar", "backend", Hook.SET),
    *_attributes("grammars", "vllm.sampling_params", "StructuredOutputsParams",
                 "a backend for each request's grammar", "_backend"),
]  # fmt: skip

ENTRIES: tuple[Entry, ...] = (
    *_CONFIG,
    *_REQUESTS,
    *_SERVER,
    *_TOOL_PARSERS,
    *_ENGINE,
    *_GRAMMARS,
    *_SCHEDULER,
    *_KV_CACHE,
    *_KV_CONNECTOR,
    *_ATTENTION,
    *_MODEL,
    *_EXPERTS,
    *_RUNNER,
    *_GRAPHS,
    *_OFFLINE,
    *_CLIENTS,
    *_NVML,
)
