"""Control loop: asks the policy once a turn, orders steps, writes the decision log.

In the server's process. Entry: ``loop.Controller``.
"""
