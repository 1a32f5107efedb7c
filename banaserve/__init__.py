"""banaserve: prefill and decode on separate real vLLM engines that share one KV cache store."""

__version__ = "0.1.0"
