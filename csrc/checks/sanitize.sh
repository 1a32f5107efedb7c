#!/usr/bin/env bash
# Runs the tests of csrc and a fuzz of its boundaries on a build with AddressSanitizer and
# UndefinedBehaviorSanitizer: `make sanitize`.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=build/sanitize
mkdir -p "$build/tree"
flags="-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
CFLAGS="-O1 -g1 $flags" LDFLAGS="$flags" .venv/bin/python setup.py --quiet build_ext \
    --build-lib "$build/lib" --build-temp "$build/temp"
# The package with this build in it, and nothing written into the real one.
rm -rf "$build/tree/banaserve"
mkdir "$build/tree/banaserve"
for item in banaserve/*; do
    case $item in */_native*.so | */__pycache__) ;; *) ln -s "$PWD/$item" "$build/tree/$item" ;; esac
done
ln -s "$PWD/$build/lib/banaserve/"_native*.so "$build/tree/banaserve/"
# Python itself is not built with the sanitizers: they have to be there before it. It leaks what it
# keeps until it ends.
preload=$(for name in asan.so ubsan.so stdc++.so.6; do c++ -print-file-name="lib$name"; done)
export LD_PRELOAD=${preload//$'\n'/ }
export ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1
export PYTHONPATH="$PWD/$build/tree" PYTHONSAFEPATH=1 PYTHONMALLOC=malloc
.venv/bin/python csrc/checks/fuzz.py "${1:-300}"
.venv/bin/python -m pytest -q -p no:cacheprovider -p no:xdist tests/kvstore/test_kvstore_native.py \
    tests/route/test_prefix_tree.py tests/route/test_predicted_latency.py
