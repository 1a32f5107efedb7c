"""Scheduler side of the connector: what to fetch, what to save, leases.

In engine cores. Entry: ``scheduler.StoreConnectorScheduler``.
"""
