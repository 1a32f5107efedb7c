"""HTTP of a server: vLLM's API server over banaserve's engine client, keys, limits, admin API.

In the server's process. Entry: ``app.make_app``.
"""
