"""Mock engines of an agent that another program starts, as Ray does.

With this folder and ``tests/mock_engine`` in PYTHONPATH, ``python -m banaserve node`` starts mock
cores; every other Python is left as it is.
"""

import sys

if sys.orig_argv[1:4] == ["-m", "banaserve", "node"]:
    from mock_serve import mock_engines

    mock_engines()
