"""Load generator: open and closed loops over streaming HTTP."""
