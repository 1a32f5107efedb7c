"""``banaserve doctor``: what this machine can run.

Entry: ``command``.
"""
