"""Forget packages of this environment whose files are not all there, and print their names."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path


def main() -> None:
    """Remove the metadata of incomplete packages, so that an installer installs them again."""
    site = Path(sysconfig.get_path("purelib"))
    lost = sorted(info for info in site.glob("*.dist-info") if _is_damaged(info))
    for info in lost:
        shutil.rmtree(info)
    if lost:
        print(", ".join(info.name.split("-")[0].replace("_", "-") for info in lost))


def _is_damaged(info: Path) -> bool:
    """Return whether a file of the package is missing, or empty where it should not be."""
    try:
        rows = [row.rsplit(",", 2) for row in (info / "RECORD").read_text().splitlines()]
        (info / "METADATA").stat()
        for name, _, size in rows:
            if name.endswith(".pyc"):  # noted or not, as the tool likes
                continue
            if not os.stat(f"{info.parent}/" + name.strip('"')).st_size and size not in ("", "0"):
                return True
    except OSError:
        return True
    return False


if __name__ == "__main__":
    main()
