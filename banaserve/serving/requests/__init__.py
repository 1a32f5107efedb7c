"""One request on its way through the instances: routing, legs, sequences, recovery.

In the server's process. Entry: ``disagg_request.run_request``.
"""
