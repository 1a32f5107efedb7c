"""Where moved modules pay more than a role switch or another step size."""
