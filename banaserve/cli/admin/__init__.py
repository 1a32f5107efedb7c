"""Commands that talk to a running server over its admin API."""
