"""Measurements of a cluster's links and nodes, for ``banaserve doctor`` and a server's start.

In the server's, a command's or an agent's process. Entries: ``survey.survey_nodes``,
``link_measuring.measure_link``.
"""
