"""``python -m banaserve.kvstore.daemon --socket PATH --size 2GiB``: run the store's process."""

import sys

from banaserve.kvstore.daemon.process import main

if __name__ == "__main__":
    sys.exit(main())
