"""All uses of private names of vLLM; no other package imports vLLM.

In engine cores, workers and the server. Entry: ``engine``; ``manifest`` lists each name, what is
set, wrapped or replaced, and why.
"""
