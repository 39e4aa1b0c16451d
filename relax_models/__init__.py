"""The model family as Relax modules, and the configuration that switches their features."""
