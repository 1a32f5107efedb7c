"""KV of moved units: slabs, copies of blocks, dirty blocks, slots of a step.

In workers and guests.
"""
