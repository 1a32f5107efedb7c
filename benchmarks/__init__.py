"""Micro-benchmarks of banaserve, one file or folder each: ``python -m benchmarks NAME``."""
