"""All uses of private names of vLLM; no other package imports vLLM.

In engine cores, workers, guests and the server's process. Entries: ``engine``, and ``hooks`` for
the list of what is set, wrapped or replaced, and why. ``__all__`` of a module lists the names that
it passes on from vLLM unchanged.
"""
