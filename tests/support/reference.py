"""What one plain vLLM engine answers."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Tokenizer

from banaserve.engine.compat.engine_errors import last_error
from fork_server import ForkServer

REFUSED = 3
"""Exit code of ``reference_tokens.py`` where vLLM has not made an engine."""


class PlainVllmError(AssertionError):
    """Plain vLLM runs no engine of the model and type; its last error is the message."""


def tokenizer(model: str) -> Callable[[str], list[int]]:
    """The token ids of a text, special ones included, as the engine's own tokenizer has them."""
    fast = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    return lambda text: list(fast.encode(text).ids)


def reference_tokens(
    forks: ForkServer,
    model: str,
    prompts: Sequence[Sequence[int]],
    samplings: Mapping[str, Mapping[str, Any]],
    *,
    dtype: str = "float32",
    alone: bool = False,
    custom_ops: Sequence[str] = (),
    adapter: str = "",
    prefix_caching: bool = True,
    options: Mapping[str, Any] = {},
) -> dict[str, list[list[int]]]:
    """The tokens of each sampling's answers, in the order of the prompts, by its name.

    Args:
        alone: Whether a prompt begins when the one before has been answered.
        custom_ops: vLLM's: kernels that it is to go without, or with.
        adapter: Folder of a LoRA adapter that answers; empty where the model does.
        prefix_caching: Whether the engine keeps prefixes, as vLLM does where it can.
        options: Further arguments of vLLM.

    Raises:
        PlainVllmError: vLLM has not made the engine, or has no code for this processor.
    """
    script = Path(__file__).with_name("reference_tokens.py")
    with TemporaryDirectory() as folder:
        asked = {"model": model, "prompts": prompts, "samplings": samplings}
        asked |= {
            "dtype": dtype,
            "alone": alone,
            "custom_ops": list(custom_ops),
            "adapter": adapter,
            "prefix_caching": prefix_caching,
            "options": dict(options),
        }
        job, out, log = (Path(folder) / name for name in ("job.json", "out.json", "log"))
        job.write_text(json.dumps(asked))
        with log.open("wb") as output:
            number = output.fileno()
            engine = forks.start([str(script), str(job), str(out)], os.environ, number, number)
            code = engine.wait()
        said = log.read_text(errors="replace")
        if code == REFUSED:
            raise PlainVllmError(last_error(said.splitlines()) or said[-2000:])
        if code == -signal.SIGILL:
            raise PlainVllmError("ended by an instruction that this processor does not have")
        assert code == 0, said[-2000:]
        found: dict[str, list[list[int]]] = json.loads(out.read_text())
    return found
