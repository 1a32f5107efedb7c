"""Load generator: open and closed loops over streaming HTTP.

In a process of ``banaserve bench``. Entries: ``loops.open_loop``, ``client.OpenAiClient``.
"""
