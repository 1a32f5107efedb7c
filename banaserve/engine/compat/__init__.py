"""All uses of private names of vLLM; no other package imports vLLM.

In engine cores, workers and the server. Entries: ``engine``, and ``hooks`` for the list of what is
set, wrapped or replaced, and why.
"""
