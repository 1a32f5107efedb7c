"""``banaserve plan``: advice whether to split prefill and decode, from simulations of both.

A process of its own. Entry: ``search.advisor.screen``, then ``search.advisor.advise``;
``search.gain.answer`` is the rule of the verdict.
"""
