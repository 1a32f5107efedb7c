#!/usr/bin/env bash
# Installs the newest wheel of dist/ into an empty environment and looks into it: `make wheel-check`.
# A wheel with CUDA has to hold code for each GPU that setup.py names.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONSAFEPATH=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_QUIET=2
wheel=
for found in "$PWD"/dist/banaserve-*.whl; do
    [ ! "$found" -nt "$wheel" ] || wheel=$found
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
say() { echo "[wheel-check] $*"; }
fail() { say "$*" >&2; exit 1; }
[ -n "$wheel" ] || fail "no wheel in dist/: run make wheel"
say "$(basename "$wheel")"

.venv/bin/python -m venv "$work/tools"
"$work/tools/bin/pip" install auditwheel
# What a wheel may need of the system: nothing beyond what manylinux allows.
"$work/tools/bin/auditwheel" show "$wheel" >"$work/audit" 2>&1 || fail "$(tail -n 1 "$work/audit")"
say "$(tr '\n' ' ' <"$work/audit" | sed -n 's/.*platform tag: "\([a-z0-9_]*\)"\. *The wheel.*/fits \1/p')"
grep -q 'manylinux' "$work/audit" || fail "the wheel fits no manylinux: see auditwheel show $wheel"

.venv/bin/python -m venv "$work/empty"
"$work/empty/bin/pip" install "$wheel"
cd "$work"
"$work/empty/bin/banaserve" version | head -n 1
"$work/empty/bin/python" - <<'EOF'
import numpy as np
import xxhash

from banaserve import _native

source, target = np.random.default_rng(0).bytes(1 << 16), np.empty(1 << 16, np.uint8)
seen = np.frombuffer(source, np.uint8)
zero = np.zeros(1, np.int64)
digest = _native.copy_regions_checksummed(
    target.ctypes.data, seen.ctypes.data, zero, zero, 1 << 16, 1 << 16, 1 << 16, True
)
assert target.tobytes() == source and digest == xxhash.xxh3_64_intdigest(source)
print(f"[wheel-check] copies and checksums with {_native.copy_instructions() or 'memcpy'}")
EOF
cd "$OLDPWD"

cuda=$("$work/empty/bin/python" -c 'import importlib.util as u
found = u.find_spec("banaserve._native_cuda")
print(found.origin if found else "")')
if [ -z "$cuda" ]; then
    [ "${BANASERVE_CUDA:-}" != 1 ] || fail "BANASERVE_CUDA=1, but the wheel holds no CUDA part"
    say "no CUDA part: BANASERVE_CUDA=1 make wheel builds one"
    exit
fi
"$work/empty/bin/python" -c 'import banaserve._native_cuda'
cuobjdump=$(command -v cuobjdump || true)
if [ -z "$cuobjdump" ]; then
    "$work/tools/bin/pip" install nvidia-cuda-cuobjdump
    cuobjdump=$(find "$work/tools" -name cuobjdump -type f | head -n 1)
fi
"$cuobjdump" --list-elf "$cuda" >"$work/codes"
for gpu in $(sed -n 's/^GPUS = (\(.*\))/\1/p' setup.py | tr -d '",'); do
    grep -q "sm_$gpu\.cubin" "$work/codes" || fail "no code for sm_$gpu"
    say "code for sm_$gpu"
done
