"""Checks of request bodies before vLLM reads them: bounds, shapes, grammars.

In the server's process. Entry: ``guard``; ``grammar_process`` is a helper process that compiles
grammars in forks.
"""
