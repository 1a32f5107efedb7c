"""``banaserve plan probe``: step times of a running server, measured through its API.

In a process of ``banaserve plan``. Entries: ``measuring.measured``, ``fit.StepFit``.
"""
