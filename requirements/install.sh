#!/usr/bin/env bash
# Fills .venv; called by `make`, which keeps the stamps. Finds a Python that can run
# requirements/installer, which does the rest.
#   install.sh venv PYTHON   create .venv with the tools that install and build
#   install.sh cpu|cuda      install vLLM, banaserve and the development tools
#   install.sh dev-full      install what tests of optional parts need
#   install.sh verify cpu|cuda   install again what .venv has lost
#   install.sh site-scripts  bring the scripts of the documents' site into .venv/docs
#   install.sh lock          write the lock files
set -euo pipefail
cd "$(dirname "$0")/.."

fail() { echo "make install: $*" >&2; exit 2; }
# One that hangs or crashes is one that does not run.
suits() {
    "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))' 2>/dev/null
}

step=${1:-}
if [ "$step" = venv ]; then
    python=${2:-}
    [ "$(uname -s)" = Linux ] || fail "needs Linux; on other systems use a Linux container"
    command -v "$python" >/dev/null ||
        fail "found no ${python:-python3}: install Python 3.11, 3.12 or 3.13, or name one in PYTHON"
    suits "$python" ||
        fail "needs Python 3.11, 3.12 or 3.13, but $python is $("$python" -V 2>&1 | head -n 1);" \
            "name another in PYTHON"
else
    python=.venv/bin/python
    suits "$python" || fail ".venv is broken, its Python does not run: \`make distclean\`, then again"
fi
# Nothing of the caller's is to be imported, nor the top-level folder `kernels` by that name.
PYTHONPATH=$PWD/requirements PYTHONSAFEPATH=1 exec "$python" -m installer "$@"
