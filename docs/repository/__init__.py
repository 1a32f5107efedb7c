"""Lint of the repository itself, one file a subject: ``python -m docs.repository``."""
