"""Memory that one process offers and its peer opens: in this process, in files, on a GPU.

In workers, guests and stores. Entries: ``offered_region.OfferedRegion`` where it is offered,
``remote_region.RemoteRegion`` where it is opened.
"""
