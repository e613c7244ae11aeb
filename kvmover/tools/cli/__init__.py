"""Commands with many options, and their options as values."""
