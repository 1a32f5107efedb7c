"""Check that a node has the server's model: other weights would generate other tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.models.files import digest_files


def model_digest(vllm_argv: Sequence[str]) -> str:
    """Return the digest of the model's files here; empty if the options name no folder. Blocking.

    Raises:
        UserError: One of the files cannot be read.
    """
    model = _folder_in(vllm_argv)
    if model is None or not model.exists():
        return ""
    try:
        return digest_files(model)
    except OSError as error:
        raise UserError(f"{model}: {error.strerror or error}") from error


def check_model(vllm_argv: Sequence[str], digest: str) -> None:
    """Compare the model's files here with those of the server. Blocking.

    Args:
        digest: Digest of the server's files; empty if the server has none.

    Raises:
        UserError: This node has no such folder, or another model in that folder.
    """
    model = _folder_in(vllm_argv)
    if model is None:
        return
    if not model.exists():
        raise UserError(f"{model}: this node has no such folder: put the same model there")
    if digest and model_digest(vllm_argv) != digest:
        raise UserError(
            f"{model}: this node's files are not those of the server: copy them there again"
        )


def _folder_in(vllm_argv: Sequence[str]) -> Path | None:
    """Return the model's folder; None if the options name a model of the hub."""
    model = Path(dict(itertools.pairwise(vllm_argv)).get("--model", ""))
    return model if model.is_absolute() else None
