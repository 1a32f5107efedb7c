"""Live migration in engines: a unit of the model leaves its worker and comes back.

In workers and guests. Entries: ``host.host.MigrationHost`` in a worker, ``guest.server`` in a
guest, ``units.registry`` for what can move. The server's part, which decides the order of calls, is
``serving.moves``; it uses the values of ``units`` and ``worker_api``.
"""
