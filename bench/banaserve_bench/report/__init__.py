"""Reports of results: tables, plots and pages.

In a process of ``banaserve bench report``. Entry: ``report.write_report``.
"""
