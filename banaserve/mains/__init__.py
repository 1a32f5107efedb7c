"""Main functions of processes, one module each: server, engine parent, engine, guest, worker.

Entry: ``serve.serve``, which runs the server; ``engine_parent`` forks engine cores and guests,
``engine`` and ``guest`` are what it forks, ``worker`` is vLLM's worker in an engine, and
``spawned`` starts a process without a parent to fork from. Agents and shims are in ``nodes``, the
store's in ``kvstore/daemon``, a balancer's in the package ``banaserve_route``.
"""
