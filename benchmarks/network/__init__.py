"""KV blocks over a link between two hosts."""
