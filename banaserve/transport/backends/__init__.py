"""Transports, each by the way that its bytes take: shared memory, CUDA IPC, TCP, a library.

In workers, guests and stores. Entry: ``shm.ShmTransport``, the shortest.
"""
