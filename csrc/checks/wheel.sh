#!/usr/bin/env bash
# Installs the newest wheels of dist/ into an empty environment and looks into them: `make wheel-check`.
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
said=$("$work/empty/bin/banaserve" route 2>&1 || true)
[[ $said == *"part of banaserve-route"* ]] || fail "the core alone says of banaserve route: $said"
for name in bench mooncake route; do
    found=$(ls -t "$OLDPWD"/dist/banaserve_"$name"-*.whl | sed -n 1p)
    "$work/empty/bin/pip" install "$found"
done
"$work/empty/bin/banaserve" route --help >route
"$work/empty/bin/banaserve" bench >bench
say "banaserve route and banaserve bench come with their own wheels"
"$work/empty/bin/banaserve" version | sed -n 1p
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
# The page is no Python: setuptools has to be told of it.
"$work/empty/bin/python" - <<'EOF'
import importlib.metadata
import pathlib

import banaserve

static = pathlib.Path(banaserve.__file__).parent / "frontdoor" / "page" / "static"
for name in ("index.html", "app.js", "style.css", "vendor/uPlot.js", "vendor/uPlot.LICENSE"):
    assert (static / name).stat().st_size, name
names = [str(one) for one in importlib.metadata.files("banaserve") or ()]
assert any(one.endswith("uPlot.LICENSE") and "licenses" in one for one in names), names
print(f"[wheel-check] the page: {sum(1 for one in static.rglob('*.*'))} files")
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
# Without a GPU too: arguments are looked at before CUDA is called.
"$work/empty/bin/python" - <<'EOF'
import numpy as np

from banaserve import _native_cuda as native

none, one, two = (np.ones(count, np.int64) for count in range(3))


def refused(call, arguments, kind, word):
    try:
        call(*arguments)
    except kind as error:
        assert word in str(error), error
        return
    raise AssertionError(f"{call} took {arguments}")


for copy in (native.copy_batch, native.copy_by_kernel):
    copy(none, none, 8, 1)
    copy(one, one, 0, 1)
    for arguments, word in [
        ((one, two, 8, 1), "src"),
        ((one * 0, one, 8, 1), "dst"),
        ((one, one * 0, 8, 1), "src"),
        ((one, one, -1, 1), "num_bytes"),
        ((one, one, 8, 0), "stream"),
    ]:
        refused(copy, arguments, ValueError, word)
    refused(copy, (one.astype(np.int32), one, 8, 1), TypeError, "dst")
for arguments, word in [((0, 0), "num_bytes"), ((-1, 0), "num_bytes"), ((1, -1), "device")]:
    refused(native.GpuSlab, arguments, ValueError, word)
print("[wheel-check] the CUDA part loads and refuses wrong arguments by name")
EOF
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
