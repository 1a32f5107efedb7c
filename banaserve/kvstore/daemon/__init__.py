"""Process of the store: serves clients, demotes and promotes blocks between tiers.

Entry: ``process.serve``.
"""
