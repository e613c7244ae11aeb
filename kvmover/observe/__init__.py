"""What a person sees: what this machine can do, tables and pictures of plans."""
