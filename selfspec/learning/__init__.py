"""What online learning is made of: lessons, and the student that learns from them."""
