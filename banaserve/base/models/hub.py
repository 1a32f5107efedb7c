"""Models from the Hugging Face hub."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from banaserve.base.errors import UserError

# Other formats of the same weights, which vLLM does not read from a model folder.
_OTHER_FORMATS = [
    *("original/*", "onnx/*", "openvino/*", "coreml/*", "consolidated*"),
    *("*.gguf", "*.onnx", "*.msgpack", "*.h5", "*.ot", "*.tflite"),
]
_PICKLED = ["*.bin", "*.pt", "*.pth"]
_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}


def fetch(repo_id: str, hint: str, progress: Callable[[str], None]) -> Path:
    """Download the model ``repo_id``, or find it in the hub's own cache, and return its folder.

    Args:
        hint: Text to append to the error if there is no such model or it cannot be obtained.

    Raises:
        UserError: There is no such model, access to it is closed, the hub cannot be reached and
            the model is not in the hub's cache, or the cache cannot be written.
    """
    from huggingface_hub import constants, errors

    # The hub's HTTP client differs between its versions (requests, httpx, httpx2); each one's
    # error class is the first base of HfHubHTTPError.
    transport_error: type[Exception] = errors.HfHubHTTPError.__bases__[0]
    if not constants.HF_HUB_OFFLINE:
        progress(f"fetching {repo_id} from {constants.ENDPOINT}")
    try:
        folder = _download(repo_id)
    except (
        errors.HFValidationError,
        errors.RepositoryNotFoundError,
        OSError,
        transport_error,
    ) as e:
        _explain(e, repo_id, hint)
    if not (folder / "config.json").is_file():
        raise UserError(f"{repo_id} has no config.json, so it is no model that vLLM can load{hint}")
    return folder


def cached(repo_id: str) -> Path | None:
    """Return the folder of ``repo_id`` in the hub's own cache; None if the model is not there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:
        raise UserError(f"{repo_id!r} is neither a Hugging Face id nor a folder") from None
    return Path(config).parent if isinstance(config, str) else None


def _download(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download

    if _is_silent(repo_id):
        return Path(snapshot_download(repo_id, local_files_only=True))
    folder = Path(snapshot_download(repo_id, ignore_patterns=_OTHER_FORMATS + _PICKLED))
    if not any(folder.glob("*.safetensors")):
        folder = Path(snapshot_download(repo_id, ignore_patterns=_OTHER_FORMATS))
    return folder


def _is_silent(repo_id: str) -> bool:
    """Return whether the hub does not answer within HF_HUB_ETAG_TIMEOUT seconds, by default 10.

    snapshot_download has no timeout: behind a firewall it would wait for ever.
    """
    from huggingface_hub import HfApi, constants, errors

    try:
        HfApi().repo_info(repo_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except (errors.HfHubHTTPError.__bases__[0], errors.HFValidationError, OSError) as error:
        return "Timeout" in type(error).__name__
    return False


def _explain(error: Exception, repo_id: str, hint: str) -> NoReturn:
    from huggingface_hub import constants, errors

    endpoint, cache = constants.ENDPOINT, constants.HF_HUB_CACHE
    if isinstance(error, errors.GatedRepoError):
        message = (
            f"{repo_id} is gated: ask for access on {endpoint}/{repo_id}, then run `hf auth login` "
            "or set HF_TOKEN"
        )
    elif isinstance(error, errors.HFValidationError | errors.RepositoryNotFoundError):
        message = (
            f"there is no model {repo_id} on {endpoint}, or it is private and HF_TOKEN is missing"
            f"{hint}"
        )
    elif isinstance(error, OSError) and error.errno in _DISK_ERRORS:
        message = (
            f"cannot keep {repo_id} in {cache} ({error.strerror}): make room or give another "
            "folder in HF_HOME"
        )
    elif constants.HF_HUB_OFFLINE:
        message = (
            f"HF_HUB_OFFLINE is set and {repo_id} is not in {cache}: unset it, set HF_HOME to a "
            f"cache that holds the model, or give a local folder{hint}"
        )
    else:
        message = (
            f"cannot fetch {repo_id} from {endpoint}: give a local folder, a cache that holds the "
            "model in HF_HOME, a mirror in HF_ENDPOINT, or --model smollm2-135m, which needs no "
            f"hub{hint}"
        )
    raise UserError(message) from error
