"""Values to text and back: JSON, records, figures with their spread, names with a hint.

In any process. Entries: ``json_text``, ``figure_text.number``.
"""
