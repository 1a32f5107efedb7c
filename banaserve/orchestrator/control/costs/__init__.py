"""Step times and transfer times of a modelled device and model.

In paced engines, in simulations and in the server's process. Entries: ``steps.StepCosts``,
``profile``.
"""
