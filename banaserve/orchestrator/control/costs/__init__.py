"""Step times and transfer times of a modelled device and model.

Entries: ``steps.StepCosts``, ``profile``.
"""
