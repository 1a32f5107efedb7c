"""Servers of this folder have mock engines."""

from mock_fixtures import launch, serve

__all__ = ["launch", "serve"]
