"""The runtime: opens a bundle and computes logits, tokens and snapshots of state."""
