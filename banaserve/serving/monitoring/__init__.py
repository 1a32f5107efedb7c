"""Reports of engines, GPU figures, metrics. In the server's process.

Entry: ``reports.ReportBoard``.
"""
