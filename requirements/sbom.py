"""Bill of materials and notices of what is installed: ``python requirements/sbom.py FOLDER``.

Writes ``sbom.cdx.json`` (CycloneDX 1.5) and ``THIRD-PARTY-NOTICES`` from the metadata of the
packages that this Python, or the one of ``--site``, imports, and of what banaserve carries of
others. Needs the standard library alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import NamedTuple

OWN = "banaserve"
OWN_PACKAGES = {OWN, "banaserve-bench", "banaserve-mooncake", "banaserve-route"}
CARRIED = Path(__file__).parents[1] / "banaserve" / "frontdoor" / "page" / "vendor.toml"
"""Says what banaserve's own package holds of others."""
_UNKNOWN = ("", "UNKNOWN", "none")
_LICENSE_NAMES = ("licen", "copying", "notice", "authors")
_MAX_NAME_CHARS = 100
_MAX_TEXT_BYTES = 2**20


def main(argv: list[str]) -> int:
    """Write both files; 1 where a package has no name or version."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("folder", type=Path, help="where the files go")
    parser.add_argument("--site", type=Path, help="site-packages to describe instead of our own")
    known = parser.parse_args(argv)
    found = packages(distributions(path=[str(known.site)]) if known.site else distributions())
    if not found:
        print("sbom: nothing is installed there", file=sys.stderr)
        return 1
    own = carried(CARRIED)
    known.folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(bill_of_materials(found, own), indent=1, sort_keys=True) + "\n"
    (known.folder / "sbom.cdx.json").write_text(text)
    (known.folder / "THIRD-PARTY-NOTICES").write_text(notices(found, own))
    print(f"{known.folder}: {len(found)} packages, {len(own)} carried by {OWN}")
    return 0


class Carried(NamedTuple):
    """A package whose files are inside ours."""

    name: str
    version: str
    licence: str
    purl: str
    licence_text: str


def carried(told: Path) -> list[Carried]:
    """What ``told`` lists, with the texts of the licences, which lie beside it."""
    return [
        Carried(
            one["name"],
            one["version"],
            one["licence"],
            one["purl"],
            (told.parent / one["licence_file"]).read_text().strip(),
        )
        for one in tomllib.loads(told.read_text())["package"]
    ]


def packages(found: Iterable[Distribution]) -> list[Distribution]:
    """Packages by name, each once: the first that an import would find."""
    by_name: dict[str, Distribution] = {}
    for one in found:
        if one.metadata["Name"]:
            by_name.setdefault(canonical(one.metadata["Name"]), one)
    return [by_name[name] for name in sorted(by_name)]


def canonical(name: str) -> str:
    """A package's name as PyPI writes it."""
    return name.lower().replace("_", "-").replace(".", "-")


def bill_of_materials(
    found: Iterable[Distribution], own: Sequence[Carried] = ()
) -> dict[str, object]:
    """CycloneDX 1.5 as plain values; the same for the same packages."""
    components = [_component(one) for one in found]
    components += [
        {
            "type": "library",
            "bom-ref": one.purl,
            "purl": one.purl,
            "name": one.name,
            "version": one.version,
            "licenses": [{"license": {"name": one.licence}}],
        }
        for one in own
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": OWN}},
        "components": components,
    }


def _component(one: Distribution) -> dict[str, object]:
    name, version = canonical(one.metadata["Name"]), one.version
    component: dict[str, object] = {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{version}",
        "purl": f"pkg:pypi/{name}@{version}",
        "name": name,
        "version": version,
    }
    if licence := licence_of(one):
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def licence_of(one: Distribution) -> str:
    """Its licence as its metadata say; empty where they do not."""
    metadata = one.metadata
    expression = str(metadata.get("License-Expression") or "").strip()
    if expression:
        return expression
    classified = [
        words.rpartition(" :: ")[2]
        for words in metadata.get_all("Classifier") or ()
        if words.startswith("License ::")
    ]
    if classified:
        return "; ".join(classified)
    # Some give the whole text there.
    first = str(metadata.get("License") or "").strip().partition("\n")[0]
    return "" if first in _UNKNOWN else first[:_MAX_NAME_CHARS]


def notices(found: Iterable[Distribution], own: Sequence[Carried] = ()) -> str:
    """Name, version and licence of each package but ours, and the texts that come with it."""
    parts = ["Packages that are distributed together with banaserve, and their licences.\n"]
    for one in found:
        if canonical(one.metadata["Name"]) in OWN_PACKAGES:
            continue
        title = f"{one.metadata['Name']} {one.version}"
        parts.append(f"{'=' * 78}\n{title}\nLicence: {licence_of(one) or 'see its own files'}\n")
        parts += [f"{'-' * 78}\n{name}\n\n{text}\n" for name, text in licence_texts(one)]
    for two in own:
        title = f"{two.name} {two.version}, inside {OWN}"
        parts.append(f"{'=' * 78}\n{title}\nLicence: {two.licence}\n")
        parts.append(f"{'-' * 78}\nLICENSE\n\n{two.licence_text}\n")
    return "\n".join(parts)


def licence_texts(one: Distribution) -> list[tuple[str, str]]:
    """Names and texts of the licence files in its metadata folder."""
    texts = []
    for path in sorted(one.files or ()):
        is_metadata = any(part.endswith((".dist-info", ".egg-info")) for part in path.parts)
        if not is_metadata or not path.name.lower().startswith(_LICENSE_NAMES):
            continue
        place = Path(str(path.locate()))
        if place.is_file() and place.stat().st_size <= _MAX_TEXT_BYTES:
            texts.append((path.name, place.read_text(errors="replace").strip()))
    return texts


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
