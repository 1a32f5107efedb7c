"""Values that pass between processes or over the admin API, one module for each kind.

In every process. Entries: ``instances`` for steps of a plan and their outcomes, ``control_api``,
``migration_api`` and ``restart_api`` for the admin API, ``trace_events`` for what processes note
about a request. No effects.
"""
