"""The same cluster in virtual time: engines by a cost model, decisions by the code of a server.

Entry: ``run.simulate``. In a process of ``banaserve simulate``, and in the elastic policy's
forecasts.
"""
