"""Where a NaN or infinity came from: the flags that the norms raised, in words."""

from __future__ import annotations

from typing import Any

import numpy as np

from k3tvm.errors import NumericsError

Array = np.ndarray[Any, Any]


class BadLogits(NumericsError):
    """Logits of some sequences were not finite; their slots were reset.

    `slots`: the slots that were reset. `logits` [m, vocab]: all rows of the call; those of the
    other slots are right and their state has advanced.
    """

    def __init__(self, place: str, slots: tuple[int, ...], logits: Array) -> None:
        many = "slots" if len(slots) > 1 else "slot"
        super().__init__(
            f"logits are not finite; first seen in {place};"
            f" {many} {', '.join(map(str, slots))} reset",
            cure="check the weights of that part; if they are fine, please report this",
        )
        self.slots, self.logits = slots, logits


def first_place(health: Array, slot: int) -> str:
    """The part of the model that first gave a stream that is not finite for a slot.

    health [sites, slots]: site 2i is the input of layer i's mixer, 2i+1 of its feed-forward part,
    the last the final norm; a flag there means that the part before it is at fault.
    """
    flagged = np.flatnonzero(health[:, slot])
    if not len(flagged):
        return "the final norm or the output head"
    site = int(flagged[0])
    if site == 0:
        return "the embedding"
    layer, half = divmod(site - 1, 2)
    return f"layer {layer} ({'feed-forward' if half else 'attention'}), counting from 0"
