"""Agent sessions on paced engines: what the store brings them, over plain engines and balancers."""
