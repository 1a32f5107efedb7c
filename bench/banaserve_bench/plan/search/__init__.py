"""Search for the arrangement of a load, and the rule of the verdict.

In the process of ``banaserve plan``. Entries: ``advisor.advise``, ``gain.answer``.
"""
