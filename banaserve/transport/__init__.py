"""One-sided copies and messages between two processes: by memory, CUDA IPC, TCP, NIXL.

Entry: ``registry.create``. In workers, guests and stores.
"""
