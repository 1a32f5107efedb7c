"""Page under ``/ui``: its files, snapshots, viewers, and the replay of decision logs.

In the server's process, and that of ``banaserve ui --replay``. Entry: ``viewers.Viewers``. No vLLM,
no torch.
"""
