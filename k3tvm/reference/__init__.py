"""Turns token ids into logits with plain torch, straight from the specification: the truth.

`weights` turns checkpoint tensors into torch, `ops` holds the formulas, `blocks` the two mixers
and the two feed-forward kinds, `model` the decoder. Nothing here imports TVM or shares code with
the compiled model.
"""

from k3tvm.reference.model import Reference, Routing, State

__all__ = ["Reference", "Routing", "State"]
