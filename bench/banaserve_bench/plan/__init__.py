"""``banaserve plan``: advice whether to split prefill and decode, from simulations of both.

A process of its own. Entry: ``advisor.screen``, then ``advisor.advise``; ``gain.answer`` is the
rule of the verdict.
"""
