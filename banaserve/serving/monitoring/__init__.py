"""Reports of engines, GPU figures, metrics, OpenTelemetry spans. In the server's process.

Entry: ``reports.ReportBoard``.
"""
