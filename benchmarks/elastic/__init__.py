"""Elastic arrangements against every fixed one, in the simulator."""
