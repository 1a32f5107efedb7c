"""Bill of materials and notices, of packages made here and of those that are installed."""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.room

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sbom", ROOT / "requirements" / "sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def install(site: Path, name: str, metadata: str, **files: str) -> None:
    folder = site / f"{name}-1.0.dist-info"
    (folder / "licenses").mkdir(parents=True)
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n{metadata}"
    )
    for file, text in files.items():
        (folder / "licenses" / file).write_text(text)
    record = [f"{folder.name}/METADATA,,", *(f"{folder.name}/licenses/{one},," for one in files)]
    (folder / "RECORD").write_text("\n".join(record) + "\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "First_One", "License-Expression: MIT\n", LICENSE="Permission is granted")
    install(site, "second", "Classifier: License :: OSI Approved :: BSD License\n", NOTICE="Yours")
    install(site, "third", "License: A whole text\n of lines\n")
    install(site, "banaserve", "License-Expression: Apache-2.0\n", LICENSE="Ours")
    return site


def test_each_package_is_there_with_version_and_licence(
    sbom: ModuleType, site: Path, tmp_path: Path
) -> None:
    assert sbom.main([str(tmp_path / "out"), "--site", str(site)]) == 0
    told = json.loads((tmp_path / "out" / "sbom.cdx.json").read_text())
    assert (told["bomFormat"], told["specVersion"]) == ("CycloneDX", "1.5")
    assert [(one["purl"], one["licenses"][0]["license"]["name"]) for one in told["components"]] == [
        ("pkg:pypi/banaserve@1.0", "Apache-2.0"),
        ("pkg:pypi/first-one@1.0", "MIT"),
        ("pkg:pypi/second@1.0", "BSD License"),
        ("pkg:pypi/third@1.0", "A whole text"),
        ("pkg:npm/uplot@1.6.32", "MIT"),
    ]


def test_notices_have_the_texts_of_others(sbom: ModuleType, site: Path, tmp_path: Path) -> None:
    sbom.main([str(tmp_path / "out"), "--site", str(site)])
    text = (tmp_path / "out" / "THIRD-PARTY-NOTICES").read_text()
    assert "First_One 1.0\nLicence: MIT" in text
    assert "Permission is granted" in text
    assert "Yours" in text
    assert "Ours" not in text


def test_an_empty_folder_is_one_line(
    sbom: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sbom.main([str(tmp_path / "out"), "--site", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "sbom: nothing is installed there\n"


def test_what_is_installed_here_is_described(sbom: ModuleType) -> None:
    found = sbom.packages(distributions())
    names = {component["name"] for component in sbom.bill_of_materials(found)["components"]}
    assert {"msgspec", "numpy", "uvicorn", "pytest"} <= names
    # Nearly all say what their licence is.
    unknown = [one.metadata["Name"] for one in found if not sbom.licence_of(one)]
    assert len(unknown) < len(found) / 10, unknown
