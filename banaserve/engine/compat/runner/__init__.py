"""Uses of vLLM in workers and guests: models, attention, experts and CUDA graphs.

Entry: ``model``.
"""
