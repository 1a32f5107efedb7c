"""The same cluster in virtual time: engines by a cost model, decisions by the code of a server.

Entry: ``cluster.cluster.SimCluster``. In the elastic policy's forecasts, and in processes of
``banaserve simulate`` and ``banaserve plan``.
"""
