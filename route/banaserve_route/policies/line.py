"""Straight line through measured times, learnt online; it is in C++."""

from __future__ import annotations

from banaserve._native import Line

__all__ = ["Line"]
