"""Agents of nodes started by Ray. In the server's process and in Ray's actors."""
