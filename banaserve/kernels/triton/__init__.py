"""The kernels in Triton, each with the operator that torch can trace.

In workers and guests. Entry: ``kernels.TritonKernels``.
"""
