"""Options of the server and of its orchestrator, declared once and checked. Entry: ``serve_config.ServeConfig``.

In every process that takes options.
"""
