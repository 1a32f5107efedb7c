"""Decisions: ``control`` is pure, ``planner`` is the control loop and the elastic policy.

In the server's process, and a process beside it that forecasts. Entries:
``control.turn.concluded``, ``planner.policy.decide``. The simulator runs the same modules in
virtual time; engine cores and workers use some of ``control.costs`` and ``control.model``.
"""
