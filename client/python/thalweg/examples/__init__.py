"""Programs to learn from: `thalweg run … -m thalweg.examples.NAME`."""
