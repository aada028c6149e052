"""What `thalweg.ddp.attach` does with a module: whether it can be served, states, checkpoints."""
