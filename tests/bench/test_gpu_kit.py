"""The kit for a GPU machine: what it keeps of vLLM, its pieces, and what is refused there."""

from __future__ import annotations

import os
import shutil
import struct
import sys
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from benchmarks.gpu import kit, start
from benchmarks.gpu.fatbins import keep_architectures
from benchmarks.gpu.kit_files import Kit, KitError, unpack, version_of
from benchmarks.location import ROOT

PTX, MACHINE_CODE = 1, 2


# ---- code of other architectures


def container(*codes: tuple[int, int, bytes]) -> bytes:
    """A container of GPU code as nvcc writes it, of (kind, architecture, code)."""
    entries = b""
    for kind, architecture, code in codes:
        header = bytearray(64)
        struct.pack_into("<HHIQ", header, 0, kind, 0x101, 64, len(code))
        struct.pack_into("<I", header, 28, architecture)
        entries += bytes(header) + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_code_of_other_architectures_is_zeroed_in_place() -> None:
    mine, other, text = b"nine" * 4, b"ten." * 4, b"ptx!" * 4
    library = b"ELF" + container((MACHINE_CODE, 90, mine), (MACHINE_CODE, 100, other)) + b"between"
    library += container((PTX, 90, text)) + b"end"
    kept = keep_architectures(library, {90})
    assert len(kept) == len(library)
    assert mine in kept
    assert other not in kept
    assert text not in kept
    zeros = bytes(16)
    assert kept == library.replace(other, zeros).replace(text, zeros)


@pytest.mark.parametrize("cut", [1, 20, 60, 90])
def test_what_is_no_container_stays_as_it_is(cut: int) -> None:
    library = b"ELF" + container((MACHINE_CODE, 100, bytes(range(64))))
    assert keep_architectures(library[:-cut], {90}) == library[:-cut]


# ---- packages


def test_every_package_of_the_kit_is_locked_with_hashes() -> None:
    names = kit._names()
    locks = [ROOT / "requirements" / lock for lock in kit._LOCKS]
    requirements = kit.locked([*names, "vllm"], locks)
    assert requirements.count("==") == len(names) + 1
    assert all("--hash=sha256:" in one for one in requirements.split("\n\n") if "==" in one)
    assert " ;" not in requirements


def test_a_package_without_a_lock_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text(
        "here==1 \\\n    --hash=sha256:0\nhere-too==2 \\\n    --hash=x\n"
    )
    with pytest.raises(UserError, match="no lock names gone"):
        kit.locked(["here", "gone"], [tmp_path / "a.lock"])
    assert "here-too" not in kit.locked(["here"], [tmp_path / "a.lock"])


# ---- unpacked there


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "banaserve").mkdir(parents=True)
    shutil.copytree(ROOT / "csrc", root / "csrc")
    shutil.copytree(ROOT / "requirements", root / "requirements")
    shutil.copy(ROOT / "setup.py", root)
    return root


@pytest.fixture
def packed(checkout: Path, tmp_path: Path) -> Path:
    """A kit of two small files in several pieces."""
    site, out = tmp_path / "site", checkout / ".kit"
    (site / ".banaserve").mkdir(parents=True)
    out.mkdir()
    (site / ".banaserve" / "_native.abi3.so").write_bytes(b"library")
    (site / "random.bin").write_bytes(os.urandom(5000))
    with kit.Progress() as progress:
        pieces = kit._pack(site, out, 2000, progress, progress.add_task("", total=1))
    assert len(pieces) >= 3
    ours = f"{sys.version_info.major}.{sys.version_info.minor}"
    Kit(version_of(checkout), ours, "0.32.0", (90,), pieces).write(out)
    return out


def test_pieces_are_unpacked_once(checkout: Path, packed: Path) -> None:
    site = unpack(packed, checkout)
    assert (site / "random.bin").stat().st_size == 5000
    assert (checkout / "banaserve" / "_native.abi3.so").read_bytes() == b"library"
    for piece in packed.glob("site.tar.xz.*"):
        piece.unlink()
    assert unpack(packed, checkout) == site, "it is unpacked already"


def test_a_kit_that_cannot_be_used_is_refused(checkout: Path, packed: Path) -> None:
    piece = packed / "site.tar.xz.01"
    good = piece.read_bytes()
    piece.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    with pytest.raises(KitError, match=r"site\.tar\.xz\.01 is damaged: bring it along again"):
        unpack(packed, checkout)
    piece.unlink()
    with pytest.raises(KitError, match=r"lacks its piece site\.tar\.xz\.01: bring it along"):
        unpack(packed, checkout)
    piece.write_bytes(good)
    newer = Kit.read(packed)
    Kit(newer.version, "3.99", newer.vllm, newer.gpus, newer.pieces).write(packed)
    with pytest.raises(KitError, match=r"needs Python 3\.99 and .* is 3\.\d+: name another one"):
        unpack(packed, checkout)
    with (checkout / "setup.py").open("a") as changed:
        changed.write("# other flags\n")
    with pytest.raises(KitError, match=r"built from other requirements .*: run `make gpu-kit`"):
        unpack(packed, checkout)
    (packed / "kit.json").write_text("{")
    with pytest.raises(KitError, match="run `make gpu-kit` again"):
        unpack(packed, checkout)
    (packed / "kit.json").unlink()
    with pytest.raises(KitError, match=r"holds no kit\.json"):
        unpack(packed, checkout)


@pytest.mark.parametrize(
    ("has_kit", "missing"), [(False, "torch"), (False, "vllm"), (True, "torch"), (True, "")]
)
def test_a_python_without_torch_is_refused(
    has_kit: bool, missing: str, checkout: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kit:
        shutil.rmtree(packed)
    monkeypatch.setattr(start, "find_spec", lambda name: None if name == missing else name)
    if missing:
        with pytest.raises(KitError, match=f"has no {missing}: name a Python .* in GPU_PYTHON"):
            start.prepare(checkout)
    else:
        variables = start.prepare(checkout)
        site, _, rest = variables["PYTHONPATH"].partition(os.pathsep)
        assert (Path(site) / "random.bin").exists()
        assert rest.startswith(str(checkout))
