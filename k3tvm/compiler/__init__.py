"""The compiler: from a checkpoint to a bundle."""
