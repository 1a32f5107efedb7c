"""Commands. Each runs in a process of its own; ``serve`` becomes the server's process.

Entry: ``main.main``. A command's module is imported only when the command runs.
"""
