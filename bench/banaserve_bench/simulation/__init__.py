"""``banaserve simulate``: loads, cases and systems for the core's simulator, ``banaserve.sim``.

In a process of its own. Entries: ``job.job`` makes what is to be run of options, ``run.simulate``
runs it.
"""
