"""What malloc is told of its heaps."""

from __future__ import annotations

import ctypes
import threading

import psutil
from forked import forked

from banaserve.platform import linux

NUM_BYTES = 64 << 20
