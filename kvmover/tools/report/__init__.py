"""The report sums up run logs: a page in the terminal and a trace for Perfetto."""
