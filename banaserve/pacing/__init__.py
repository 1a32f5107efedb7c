"""Modelled time of real engines: each step takes as long as on the modelled device.

In engine cores and workers. Entry: ``install.install``.
"""
