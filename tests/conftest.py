"""Settings of the whole suite."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no bug, and a failure must come again when the suite is run again.
settings.register_profile("banaserve", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("banaserve")
