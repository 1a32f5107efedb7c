"""Policies exactly as a paper describes them, where the default differs."""
