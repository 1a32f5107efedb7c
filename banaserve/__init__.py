"""banaserve: prefill and decode apart on real vLLM engines, over one KV cache store."""

__version__ = "0.1.0"
