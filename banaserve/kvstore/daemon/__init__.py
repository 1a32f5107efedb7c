"""Process of the store: serves clients, demotes and promotes blocks between tiers.

Entry: ``process.serve``. ``supervised`` and ``options`` are for the process that starts the store:
the server's, or an agent's.
"""
