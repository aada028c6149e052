"""What users set: variables of the environment, codecs as text, and how warnings are shown."""
