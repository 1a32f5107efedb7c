"""Load generator, comparison of systems, reports, and one format of results.

In a process of ``banaserve bench``. Entry: ``serving.command.main``. It talks to servers over HTTP
only.
"""
