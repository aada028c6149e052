"""Contains the parts of thalweg.examples.gpt_local: a GPT learns Python's standard library."""
