"""A plan is shown here as tables and as a picture."""
