"""What a user can get wrong with an SSD tier's folder: one line each."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.folder import Folder
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier

MIB = 2**20
BLOCK = Path("blocks", "07", f"{7:064x}-{7:016x}.block")


def refusal(folder: Path, capacity_bytes: int = MIB, queue_depth: int = 4) -> str:
    with pytest.raises(UserError) as caught:
        SsdTier(folder, capacity_bytes, queue_depth=queue_depth)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_is_created_private(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    # The strictest and the most generous: what is private does not hang on the user's own.
    for umask in (0o077, 0o000):
        before = os.umask(umask)
        try:
            SsdTier(folder, MIB).close()
        finally:
            os.umask(before)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.rglob("*"))
        if umask:
            shutil.rmtree(folder)
    assert (folder / "format").read_bytes() == b"banaserve ssd files 2\n"


def test_a_second_store_is_turned_away(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, MIB)
    message = refusal(tmp_path)
    assert f"in use by another store (process {os.getpid()})" in message
    tier.close()
    SsdTier(tmp_path, MIB).close()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"banaserve ssd log 1\n", "has format 1 and this version reads 2"),
        (b"banaserve ssd files 3\n", "has format 3 and this version reads 2"),
        (b"banaserve ssd files 999999999\n", "has format 999999999"),
        (b"banaserve ssd files -1\n", "no SSD tier's folder"),
        (b"something else", "no SSD tier's folder"),
        (b"", "no SSD tier's folder"),
        (b"\xff" * 10000, "no SSD tier's folder"),
    ],
)
def test_other_formats_are_refused_and_left_alone(
    tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "format").write_bytes(content)
    assert said in refusal(tmp_path)
    assert (tmp_path / "format").read_bytes() == content
    with pytest.raises(UserError, match=said):
        check_folder(tmp_path)
    # The refusal has let go of the lock.
    (tmp_path / "format").write_bytes(b"banaserve ssd files 2\n")
    SsdTier(tmp_path, MIB).close()


@pytest.mark.parametrize("name", ["lock", "format.tmp"])
def test_a_link_that_somebody_has_put_there_is_not_followed(tmp_path: Path, name: str) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.write_text("something dear")
    (folder / name).symlink_to(elsewhere)
    assert str(folder) in refusal(folder)
    assert elsewhere.read_text() == "something dear"


def test_a_folder_of_others_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear")
    assert "holds thesis.tex" in refusal(tmp_path)
    with pytest.raises(UserError, match="no SSD tier's folder"):
        check_folder(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "dear"
    assert not (tmp_path / "format").exists()


@pytest.mark.parametrize("content", [b"", b"x\n", b"-1\n", b"9" * 19 + b"\n", b"9" * 50])
def test_a_damaged_note_of_what_was_cleared(tmp_path: Path, content: bytes) -> None:
    SsdTier(tmp_path, MIB).close()
    (tmp_path / "cleared").write_bytes(content)
    assert "is damaged: remove the folder" in refusal(tmp_path)
    with pytest.raises(UserError, match="is damaged"):
        check_folder(tmp_path)


def test_a_file_instead_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "name a folder" in refusal(tmp_path / "file")
    assert "name a folder" in refusal(tmp_path / "file" / "below")


def test_a_folder_instead_of_a_block(tmp_path: Path) -> None:
    SsdTier(tmp_path, MIB).close()
    (tmp_path / BLOCK).mkdir()
    assert "cannot use" in refusal(tmp_path)


def test_a_link_instead_of_a_block(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"x" * 5000)
    SsdTier(tmp_path / "tier", MIB).close()
    (tmp_path / "tier" / BLOCK).symlink_to(tmp_path / "precious")
    assert "cannot use" in refusal(tmp_path / "tier")
    assert (tmp_path / "precious").read_bytes() == b"x" * 5000


def test_files_of_others_among_the_blocks_are_left_alone(tmp_path: Path) -> None:
    SsdTier(tmp_path, MIB).close()
    dear = tmp_path / "blocks" / "07" / "thesis.tex"
    dear.write_text("dear")
    SsdTier(tmp_path, MIB).close()
    assert dear.read_text() == "dear"
    assert check_folder(tmp_path).num_files == 0


def test_limits(tmp_path: Path) -> None:
    assert "at least 256 KiB" in refusal(tmp_path, capacity_bytes=1000)
    assert "at least 256 KiB" in refusal(tmp_path, capacity_bytes=-1)
    assert "within 1 to" in refusal(tmp_path, queue_depth=0)
    assert "within 1 to" in refusal(tmp_path, queue_depth=5000)
    assert not list(tmp_path.iterdir())


OPEN = """
import os, sys
from pathlib import Path
from banaserve.base.errors import UserError
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.folder import Folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier
folder = Path(sys.argv[1])
# Whoever may do everything becomes somebody else.
if sys.argv[3:] and os.geteuid() == 0:
    os.setuid(65534)
try:
    if sys.argv[2] == "open":
        SsdTier(folder, 2**20).close()
    elif sys.argv[2] == "fill":
        import errno
        SsdTier(folder, 2**20).close()
        with (folder.parent / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(4096))
            except OSError as error:
                assert error.errno == errno.ENOSPC
        first = SsdTier(folder, 2**20)
        in_use = check_folder(folder).in_use
        first.close()
        print("served,", in_use, "then", check_folder(folder).in_use)
    else:
        print(check_folder(folder))
except UserError as error:
    print(error)
"""


def in_a_process(folder: Path, what: str, *prefix: str, as_nobody: bool = False) -> str:
    # Relative, so that another user needs no right to the folders above.
    command = [*prefix, sys.executable, "-c", OPEN, folder.name, what]
    command += ["as nobody"] if as_nobody else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder.parent, check=False)
    if done.returncode:
        pytest.skip(f"cannot be tried here: {done.stderr.splitlines()[-1:]}")
    assert done.stdout.count("\n") == 1
    return done.stdout


def test_wrong_permissions(tmp_path: Path) -> None:
    folder = tmp_path / "log"
    SsdTier(folder, MIB).close()
    folder.chmod(0)
    try:
        for what in ("open", "check"):
            said = in_a_process(folder, what, as_nobody=True)
            assert "Permission denied; give this user the right to read and write" in said
    finally:
        folder.chmod(0o700)


def test_a_read_only_disk(tmp_path: Path) -> None:
    SsdTier(tmp_path, MIB).close()
    mount = f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path}"
    prefix = ("unshare", "-rm", "sh", "-c", f'{mount} && exec "$0" "$@"')
    assert "Read-only file system; name a folder on a disk" in in_a_process(
        tmp_path, "open", *prefix
    )
    assert "num_corrupt=0" in in_a_process(tmp_path, "check", *prefix)


def test_a_full_disk(tmp_path: Path) -> None:
    fill = f"mount -t tmpfs -o size=64k tmpfs {tmp_path} && head -c 64k /dev/zero > {tmp_path}/f"
    prefix = ("unshare", "-rm", "sh", "-c", f'{fill}; cd {tmp_path} && mkdir log; exec "$0" "$@"')
    said = in_a_process(tmp_path / "log", "open", *prefix)
    assert "No space left on device; make room on that disk" in said


def test_a_disk_that_is_full_already_is_no_reason_not_to_serve_what_is_there(
    tmp_path: Path,
) -> None:
    script = f'mount -t tmpfs -o size=2m tmpfs {tmp_path} && cd {tmp_path}; exec "$0" "$@"'
    said = in_a_process(tmp_path / "log", "fill", "unshare", "-rm", "sh", "-c", script)
    assert said == "served, True then False\n"


def test_files_are_on_the_disk_before_they_have_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a loss of power leaves an empty one, and the next start refuses the folder."""
    seen: list[tuple[str, str]] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(fd: int) -> None:
        real_fsync(fd)
        seen.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def rename(path: Path, target: Path) -> Path:
        seen.append(("rename", target.name))
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    folder = Folder(tmp_path / "kv")
    assert seen == [("fsync", "format.tmp"), ("rename", "format"), ("fsync", "kv")]
    folder.write_cleared(7)
    folder.sync()
    assert seen[3:] == [("fsync", "cleared.tmp"), ("rename", "cleared"), ("fsync", "kv")]
    folder.close()
