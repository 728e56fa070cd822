"""What a step will send, hold and take on a machine that need not be here: the real plan, and a model of time."""
