"""Measurements of a cluster's links and nodes, for ``banaserve doctor`` and a server's start.

In the server's or the command's process. Entries: ``survey.survey_nodes``; in an agent,
``inspection.inspect_node``.
"""
