"""Plans, and the policies that make them."""
