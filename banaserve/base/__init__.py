"""Foundation of all other packages: errors, clock, configuration, registries, names.

In every process. Entries: ``config.serve_config.ServeConfig`` for ``banaserve serve``, ``types``
for the values that pass between layers, ``errors`` for exceptions. Imports neither torch nor vLLM.
"""
