"""What tests of optimizers and transports need, shipped so that other packages can use it."""
