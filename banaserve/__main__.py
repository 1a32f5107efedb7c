"""Entry of ``python -m banaserve``, which is the ``banaserve`` command."""

import sys

from banaserve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
