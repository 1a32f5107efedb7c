"""Results of a simulation: totals and summaries, and a trace of all steps for a browser.

In ``banaserve simulate`` and in forecasts of the elastic policy. Entry: ``result.tally``.
"""
