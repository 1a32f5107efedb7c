"""KV of moved units: slabs, copies of blocks, dirty blocks, slots of a step.

In workers and guests. Entries: ``host_kv.HostKv`` of a host, ``remote_kv.RemoteKv`` of a unit.
"""
