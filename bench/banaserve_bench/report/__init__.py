"""Reports of results: tables, plots and pages."""
