"""Agent of a node: sessions of servers, and the processes that it runs for them.

In the agent's process. Entry: ``agent.NodeAgent``.
"""
