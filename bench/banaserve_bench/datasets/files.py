"""Data files of prompts: the user's own, or fetched from the Hugging Face hub.

No data file comes with the code; ``--data hub`` fetches some.

A file holds one JSON object a line (``.jsonl``, or ``.jsonl.zst`` with the zstandard package).
The fields of an object say what it is:

    instruction, input (may be empty)   Alpaca and its like: the two parts, a blank line between
    prompt, question or text            a finished prompt, as in prepared LongBench files
    context, input                      LongBench as published: needs ``dataset2prompt.json``
                                        beside the file or in ``config/`` beside it
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known

_FILES = {
    "alpaca": ("yahma/alpaca-cleaned", "alpaca_data_cleaned.json"),
    "sharegpt": (
        "anon8231489123/ShareGPT_Vicuna_unfiltered",
        "ShareGPT_V3_unfiltered_cleaned_split.json",
    ),
}
"""Repository and file of each dataset. The hub has no readable form of LongBench and the traces."""


def fetch(kind: str) -> Path:
    """Return the file of the dataset ``kind``, fetched or from the hub's own cache. Blocking.

    Raises:
        UserError: The dataset is not on the hub, or the hub cannot be reached.
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


DATA_VARIABLE = "BANASERVE_DATA"

_PATTERNS = {
    "alpaca": ("instruct/alpaca*.jsonl*", "alpaca*.json*"),
    "azure": ("traces/azure*.jsonl*", "azure*.jsonl*", "AzureLLMInferenceTrace_*.csv*"),
    "longbench": ("longbench/*.jsonl*",),
    "mooncake": ("traces/mooncake*.jsonl*", "mooncake*.jsonl*", "*conversation_trace.jsonl*"),
    "servegen": ("traces/servegen*.jsonl*", "servegen*.jsonl*"),
    "sharegpt": ("ShareGPT*.json*", "sharegpt*.json*", "traces/sharegpt*.jsonl*"),
}


def data_folder(given: Path | None) -> Path | None:
    """Return the folder of data files: ``given``, else that of BANASERVE_DATA, else None."""
    named = os.environ.get(DATA_VARIABLE)
    return given if given is not None else Path(named) if named else None


def dataset_files(kind: str, folder: Path | None) -> list[Path]:
    """Return the files of the dataset ``kind`` under ``folder``.

    ``folder`` may also be one file, which is then the dataset, or the dataset's own folder, which
    has the dataset's name.

    Raises:
        UserError: There is no folder, or it has no file of that kind.
    """
    if folder is None:
        raise UserError(
            f"the {kind} data are not part of banaserve: give their file or folder with --data "
            f"or in {DATA_VARIABLE}, or use {kind}-like"
        )
    if folder.is_file():
        return [folder]
    patterns = (*_PATTERNS[kind], *(("*.jsonl*",) if folder.name == kind else ()))
    for pattern in patterns:
        if found := sorted(folder.glob(pattern)):
            return found
    raise UserError(f"no {kind} file in {folder} (looked for {', '.join(_PATTERNS[kind])})")


def prompt_templates(path: Path) -> Mapping[str, str]:
    """Return LongBench's prompt templates by task; empty if their file is not beside ``path``."""
    for folder in (path.parent, path.parent / "config"):
        file = folder / "dataset2prompt.json"
        if file.is_file():
            try:
                return msgspec.json.decode(file.read_bytes(), type=dict[str, str])
            except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise UserError(f"{file} is not a table of prompt templates: {error}") from error
    return {}


def prompt_of(record: Mapping[str, Any], path: Path, templates: Mapping[str, str]) -> str:
    """Return the text of one object.

    Raises:
        KeyError: The object has no text; the argument of the exception says what is missing.
    """
    if isinstance(instruction := record.get("instruction"), str):
        more = record.get("input") or ""
        if not isinstance(more, str):
            raise KeyError("the field input is not a text")
        return "\n\n".join(part for part in (instruction, more) if part)
    for field in ("prompt", "question", "text"):
        if isinstance(text := record.get(field), str):
            return text
    if isinstance(record.get("context"), str):
        name = record.get("dataset") or path.name.partition(".")[0]
        if not isinstance(name, str):
            raise KeyError("the field dataset is not a name")
        if name not in templates:
            raise KeyError(
                f"no template for {name[:80]!r}: put dataset2prompt.json beside the file"
            )
        parts = {"context": record["context"], "input": record.get("input", "")}
        try:
            return templates[name].format_map(parts)
        except (ValueError, LookupError, AttributeError) as error:
            raise KeyError(
                f"dataset2prompt.json: the template of {name} is none: {error}"
            ) from None
    for field in ("instruction", "prompt", "question", "text", "context"):
        if field in record:
            raise KeyError(f"the field {field} is not a text")
    raise KeyError("none of the fields instruction, prompt, question, text or context")
