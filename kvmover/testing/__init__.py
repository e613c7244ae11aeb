"""What others can test their own parts with."""
