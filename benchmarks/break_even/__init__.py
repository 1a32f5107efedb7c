"""Break-even of moved modules: where they pay more than a switch of roles or another step size."""
