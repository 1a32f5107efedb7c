"""Uses of vLLM in the server's process: API server, clients of engines, tool calls, GPUs.

Entry: ``server``.
"""
