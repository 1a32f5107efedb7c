"""Messages between a host and its guests. In workers and guests.

Entry: ``guest_channel``.
"""
