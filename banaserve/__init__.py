"""banaserve: prefill and decode on separate real vLLM engines that share one KV cache store."""

from banaserve import old_paths

__version__ = "0.1.0"

old_paths.install()
