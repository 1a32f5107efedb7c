"""The kernels in Triton, each with the operator that torch can trace.

In workers. Entry: ``kernels.TritonKernels``.
"""
