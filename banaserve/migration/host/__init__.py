"""Host: runs moves between the worker that it is part of and its guests.

Entry: ``host.MigrationHost`` (prepare, precopy, commit, free).
"""
