"""Contains example programs: `thalweg run … -m thalweg.examples.NAME`."""
