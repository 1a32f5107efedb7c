"""Policy of ``--elastic``: roles, step sizes and moved modules, each candidate simulated first.

Entries: ``policy.decide``; ``loop.loop.Controller`` is the control loop. In the server's process,
and a process beside it that simulates.
"""
