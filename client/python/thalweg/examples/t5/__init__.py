"""Contains the parts of thalweg.examples.t5_fsdp: T5 learns to summarise functions."""
