"""When two engines compute the same values, and may read each other's KV blocks."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import ParallelConfig

from banaserve.base.errors import UserError
from banaserve.engine.connector.block_hash import check_parallel, describe_weights

LARGE = 3 * 2**20


def described(model: Path | str, load_format: str = "auto", **given: Any) -> str:
    config: dict[str, Any] = {
        "model": str(model),
        "revision": None,
        "quantization": None,
        "hf_overrides": {},
        "multimodal_config": None,
        "config_format": "auto",
        "hf_config_path": None,
    }
    config |= {"max_model_len": 4096, "hf_text_config": SimpleNamespace()}
    return describe_weights(SimpleNamespace(**{**config, **given}), load_format)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"rope_theta": 1e4}')
    (model / "model-1.safetensors").write_bytes(os.urandom(LARGE))
    (model / "model-2.safetensors").write_bytes(os.urandom(1000))
    (model / "README.md").write_text("words")
    return model


def test_a_copy_of_a_model_is_the_same(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    (copy / "README.md").write_text("other words")
    assert described(copy) == described(folder) == described(folder, "safetensors")
    assert len(described(folder)) == 32


def train(model: Path) -> None:
    (model / "model-1.safetensors").write_bytes(os.urandom(LARGE))


def train_the_rest(model: Path) -> None:
    (model / "model-2.safetensors").write_bytes(os.urandom(1000))


def stretch(model: Path) -> None:
    (model / "config.json").write_text('{"rope_theta": 1e5}')


def see_otherwise(model: Path) -> None:
    (model / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')


def stretch_as_mistral_does(model: Path) -> None:
    (model / "params.json").write_text('{"rope_theta": 1e5}')


def rename(model: Path) -> None:
    (model / "model-2.safetensors").rename(model / "model-3.safetensors")


@pytest.mark.parametrize(
    "change",
    [train, train_the_rest, stretch, stretch_as_mistral_does, see_otherwise, rename],
)
def test_a_model_whose_files_were_replaced_is_another(
    folder: Path, change: Callable[[Path], None]
) -> None:
    before = described(folder)
    change(folder)
    assert described(folder) != before


def large_with_header(model: Path, header: bytes, at: int, small: bytes) -> None:
    """Write a large file with a small tensor ``at`` bytes after the header."""
    content = len(header).to_bytes(8, "little") + header + bytes(LARGE)
    start = 8 + len(header) + at
    content = content[:start] + small + content[start + len(small) :]
    (model / "model-1.safetensors").write_bytes(content)


def test_a_model_is_another_where_only_a_small_tensor_was_trained(folder: Path) -> None:
    at = 2 * LARGE // 3 // 63 * 31 + 10_000  # between two of the pages that are spread evenly
    norm = {"dtype": "F16", "shape": [8], "data_offsets": [at, at + 16]}
    header = json.dumps({"__metadata__": {"format": "pt"}, "norm": norm}).encode()
    found = []
    for small in (b"a" * 16, b"b" * 16):
        large_with_header(folder, header, at, small)
        found.append(described(folder))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    "header",
    [
        b"{",
        b"[]",
        b'{"\xff": {}}',
        pytest.param(b'{"norm": {"shape": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", id="deep"),
        b'{"norm": {"data_offsets": "0"}}',
        b'{"norm": {"data_offsets": [-9000000, 0]}}',
        b'{"norm": {"data_offsets": [9223372036854775807, 0]}}',
        b'{"norm": {"data_offsets": [1000000000000000000000000, 0]}}',
    ],
)
def test_a_header_that_makes_no_sense_is_no_header(folder: Path, header: bytes) -> None:
    large_with_header(folder, header, 0, b"")
    assert len(described(folder)) == 32


def test_a_config_elsewhere_makes_another_model(folder: Path, tmp_path: Path) -> None:
    configs = [tmp_path / name for name in ("one", "same", "other")]
    for place, theta in zip(configs, ("1e4", "1e4", "1e5"), strict=True):
        place.mkdir()
        (place / "config.json").write_text(f'{{"rope_theta": {theta}}}')
    one, same, other = (described(folder, hf_config_path=str(place)) for place in configs)
    assert one == same
    assert len({described(folder), one, other}) == 3


def media(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"mm_processor_kwargs": None, "media_io_kwargs": {}, **given})


def test_options_that_change_what_is_computed_make_another_model(folder: Path) -> None:
    kinds = [
        described(folder),
        described(folder, "dummy"),
        described(folder, quantization="fp8"),
        described(folder, hf_overrides={"rope_scaling": {"factor": 2.0}}),
        described(folder, hf_overrides=stretch),
        described(folder, config_format="mistral"),
        described(folder, multimodal_config=media()),
        described(folder, multimodal_config=media(mm_processor_kwargs={"do_center_crop": False})),
        described(folder, multimodal_config=media(media_io_kwargs={"video": {"num_frames": 8}})),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kinds[4] == described(folder, hf_overrides=stretch)


def test_the_longest_context_counts_where_all_positions_hang_on_it(folder: Path) -> None:
    assert described(folder, max_model_len=8192) == described(folder)
    text = SimpleNamespace(rope_parameters={"rope_type": "longrope", "long_factor": [1.0]})
    one, other = (
        described(folder, max_model_len=length, hf_text_config=text) for length in (4096, 8192)
    )
    assert one != other


def test_a_single_file_is_a_model_and_so_is_a_name_that_only_the_hub_knows(folder: Path) -> None:
    one, other = (described(folder / f"model-{i}.safetensors") for i in (1, 2))
    assert one != other
    for name in ("nobody/nothing", "s3://bucket/a/model"):
        assert described(name) == described(name)


@pytest.mark.parametrize(
    "options",
    [{"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}],
)
def test_workers_that_do_not_share_a_model_by_heads_get_no_store(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match="--no-kv-store"):
        check_parallel(SimpleNamespace(**{**vars(ParallelConfig()), **options}))
    check_parallel(SimpleNamespace(**vars(ParallelConfig())))
