"""Preble's routing by cached prefixes and load, and its order of waiting requests.

Source: Srivatsa et al., 2024. In balancers and simulations. Entry: ``policy``.
"""
