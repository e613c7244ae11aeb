"""Connected ranks: who they are, whether they live, how lost ones are reached again, and what their links cost."""
