"""Huge pages for processes that read all their memory again and again: engines on a CPU.

Each step reads every weight. In pages of 4 KiB that is hundreds of thousands of entries of the page
table a step, and in a virtual machine each is looked up twice; in pages of 2 MiB it is hundreds.
Where Linux gives huge pages to those alone who ask for them (``madvise``, as most distributions
have it), PyTorch's allocator and glibc's ask if these variables say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

TORCH_VARIABLE = "THP_MEM_ALLOC_ENABLE"
GLIBC_VARIABLE = "GLIBC_TUNABLES"
MALLOC_TUNABLE = "glibc.malloc.hugetlb"
"""Of weights in the processor's own order, which come from ``malloc``."""
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def are_offered(enabled: Path = _ENABLED) -> bool:
    """Whether this system has huge pages for who asks."""
    try:
        return "[never]" not in enabled.read_text()
    except OSError:
        return False


def with_huge_pages(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns it with what makes a process ask for them; what it says of them itself stays."""
    made = {TORCH_VARIABLE: "1", **environment}
    tunables = environment.get(GLIBC_VARIABLE, "")
    if MALLOC_TUNABLE not in tunables:
        made[GLIBC_VARIABLE] = ":".join(filter(None, (tunables, f"{MALLOC_TUNABLE}=1")))
    return made
