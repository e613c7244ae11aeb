"""The views of a plan: tables and a picture."""
