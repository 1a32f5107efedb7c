"""Partial attention, merges of partial results, packing of KV blocks: native, Triton, FlashInfer.

In workers and guests. Entry: ``registry.pick``; ``reference`` says what each kernel computes.
Imports neither vLLM nor an engine.
"""
