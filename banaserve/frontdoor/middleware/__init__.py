"""ASGI layers around vLLM's app: API keys, admission, limits of latency, times of calls.

In the server's process. Entry: ``api_keys.KeyMiddleware``.
"""
