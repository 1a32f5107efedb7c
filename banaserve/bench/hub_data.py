"""Datasets from the Hugging Face hub, for users who can reach one (``--data hub``)."""

from __future__ import annotations

from pathlib import Path

from banaserve.errors import UserError
from banaserve.names import check_known

_FILES = {
    "alpaca": ("yahma/alpaca-cleaned", "alpaca_data_cleaned.json"),
    "sharegpt": (
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
}
"""Repository and file of each. LongBench and the traces are not there in a form that is read."""


def fetch(kind: str) -> Path:
    """Returns the file of the dataset ``kind``, fetched or from the hub's own cache. Blocking.

    Raises:
        UserError: It is not on the hub, or the hub cannot be reached.
    """
    check_known("dataset on the hub", kind, _FILES)
    from huggingface_hub import errors, hf_hub_download

    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    repo_id, name = _FILES[kind]
    try:
        return Path(hf_hub_download(repo_id, name, repo_type="dataset"))
    except (transport_error, errors.LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            f"cannot fetch {name} of {repo_id} ({type(error).__name__}): download it and give its "
            f"path with --data, or use {kind}-like"
        ) from error
