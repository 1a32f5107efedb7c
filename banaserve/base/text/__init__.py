"""Values to text and back: JSON, records, names with a hint.

In any process. Entries: ``json_text``, ``records``.
"""
