"""Agents of nodes started by Ray.

Entries: ``places`` in the server's process, ``driver.RayAgents`` in a process beside it,
``places.AgentActor`` in Ray's actors.
"""
