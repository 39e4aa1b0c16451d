"""Code for Apple's GPUs: Metal source, its checks, and libraries for macOS and iOS."""
