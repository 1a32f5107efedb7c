"""Decisions: ``control`` is pure, ``planner`` is the control loop and the elastic policy.

In the server's process. Entries: ``control.turn.concluded``, ``planner.policy.decide``. The
simulator runs the same modules in virtual time.
"""
