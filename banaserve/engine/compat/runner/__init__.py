"""Uses of vLLM in workers and guests: models, attention, experts and CUDA graphs.

``offline`` is a whole engine inside one process, for measurements.

Entry: ``model``.
"""
