"""Step times from measured operators of real GPUs.

In ``banaserve simulate``, in place of a profile's linear ones. Entries: ``description.read``,
``install.install``.
"""
