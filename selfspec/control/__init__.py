"""What to do next: plans, and the policies that choose them."""
