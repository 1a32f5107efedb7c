"""What one plain vLLM engine answers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


def reference_tokens(
    model: str,
    prompts: Sequence[Sequence[int]],
    samplings: Mapping[str, Mapping[str, Any]],
    *,
    dtype: str = "float32",
    alone: bool = False,
) -> dict[str, list[list[int]]]:
    """The tokens of each sampling's answers, in the order of the prompts, by its name.

    Args:
        alone: Whether a prompt begins when the one before has been answered.
    """
    script = Path(__file__).with_name("reference_tokens.py")
    with TemporaryDirectory() as folder:
        asked = {"model": model, "prompts": prompts, "samplings": samplings}
        asked |= {"dtype": dtype, "alone": alone}
        job, out = Path(folder) / "job.json", Path(folder) / "out.json"
        job.write_text(json.dumps(asked))
        command = [sys.executable, str(script), str(job), str(out)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr[-2000:]
        found: dict[str, list[list[int]]] = json.loads(out.read_text())
    return found
