"""Speed of a bundle as shares of what the machine can do, measured in the same run."""
