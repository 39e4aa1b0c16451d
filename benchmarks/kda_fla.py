"""The KDA functions of flash-linear-attention over the same inputs."""

from __future__ import annotations

from typing import Any

from kda_inputs import Array, Case, Inputs


class Fla:
    """`chunk_kda` for prompts, `fused_recurrent_kda` for single tokens, as their users call them.

    They make units of queries and keys themselves, and take the decay as it is.
    """

    def __init__(self, torch: Any, case: Case, x: Inputs) -> None:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda

        self.torch = torch
        self.function = fused_recurrent_kda if case.tokens == 1 else chunk_kda
        self.given = {
            name: torch.from_numpy(array).cuda().bfloat16()
            for name, array in (("q", x.q), ("k", x.k), ("v", x.v), ("beta", x.beta))
        }
        self.given["g"] = torch.from_numpy(x.log_decay).cuda()
        self.state = torch.from_numpy(x.state).cuda()

    def run(self) -> Any:
        """One call: (outputs, states)."""
        with self.torch.inference_mode():
            return self.function(
                **self.given,
                initial_state=self.state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

    def results(self) -> tuple[Array, Array]:
        """Outputs and states of one call."""
        out, state = self.run()
        return out.float().cpu().numpy(), state.float().cpu().numpy()
