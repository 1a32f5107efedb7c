"""Pure decisions: routing, migration, scaling, costs. No clock, no random numbers, no effects.

Entries: ``turn.concluded`` for a turn of the control loop, ``routing.registry.make`` and
``move_policies.registry`` for policies. In the server's process and in simulations; engine cores
and workers use ``costs`` and ``model``.
"""
