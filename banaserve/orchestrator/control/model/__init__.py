"""Estimates that decisions are based on: serving times, moves, hand-overs, lengths of outputs."""
