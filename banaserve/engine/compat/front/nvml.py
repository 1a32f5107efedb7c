"""NVIDIA's bindings of NVML, which vLLM includes."""

from __future__ import annotations

from typing import Any

from vllm.third_party import pynvml as _pynvml

NVML: Any = _pynvml
