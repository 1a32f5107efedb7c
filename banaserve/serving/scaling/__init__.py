"""Adding and removing instances, and nodes for them, while others serve. In the server's process.

Entry: ``scaler.Scaler.begin``.
"""
