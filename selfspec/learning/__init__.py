"""Parts of online learning: training examples, and the exit heads in training."""
