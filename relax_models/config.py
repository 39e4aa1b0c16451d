"""Turns `config.json` into one frozen dataclass that describes every member of the family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

LayerKind = Literal["kda", "mla"]
FfnKind = Literal["dense", "moe"]
Family = Literal["kimi-k3", "kimi-linear"]


@dataclass(frozen=True)
class ModelConfig:
    """The text model's shape and features (specification 1). Layers are counted from 0 here.

    Sizes are element counts. A feature that is off is None, False or 0; see each group.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    layer_kinds: tuple[LayerKind, ...]

    # KDA layers (specification 3.4); all zero when there is none.
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None  # None selects the softplus gate
    kda_full_rank_gate: bool

    # MLA layers (specification 3.6).
    num_heads: int
    q_lora_rank: int | None  # None: one full query projection
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool

    attn_res_block_size: int | None  # None: plain residual stream (specification 3.2)

    # Feed-forward layers (specification 3.7).
    hidden_act: Literal["situ", "silu"]
    situ_beta: float  # 0.0 with silu
    situ_linear_beta: float | None  # None: the up side is left alone
    intermediate_size: int
    num_experts: int  # 0: every layer is dense, and the fields below are zero
    experts_per_token: int
    moe_intermediate_size: int
    num_shared_experts: int
    latent_size: int | None  # None: experts work on hidden_size
    latent_norm: bool
    first_dense_layers: int
    moe_layer_freq: int
    renormalize: bool
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None

    # How the file is said to store things; headers decide where they can be read.
    tensor_prefix: str = ""
    weight_dtype: Literal["BF16", "F32"] = "BF16"
    mxfp4_experts: bool = False
    num_mtp_layers: int = 0  # extra prediction layers after the last; their tensors are skipped

    @classmethod
    def from_json(cls, values: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Check a parsed `config.json`; every fault is a ConfigError that names the field."""
        from k3tvm.relax_models.config_json import parse

        return cls(**parse(values, where))

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read a `config.json`, or the one inside a folder; ConfigError when it cannot be used."""
        from k3tvm.errors import ConfigError
        from k3tvm.strict_json import read_object

        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        return cls.from_json(read_object(file, ConfigError), str(file))

    def ffn_kind(self, layer: int) -> FfnKind:
        """Whether layer `layer` (from 0) has experts (specification 3.7)."""
        late = layer >= self.first_dense_layers
        return "moe" if self.num_experts and late and layer % self.moe_layer_freq == 0 else "dense"

    @property
    def family(self) -> Family:
        """Told by features, because both families name the same model_type (specification 7.22)."""
        latent = self.attn_res_block_size is not None or self.latent_size is not None
        return "kimi-k3" if latent else "kimi-linear"

    @property
    def expert_width(self) -> int:
        """Width that routed experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    @property
    def shared_size(self) -> int:
        """Inner width of the shared experts, which are stored as one; 0 when there are none."""
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def kda_width(self) -> int:
        """Channels of a KDA layer: heads times head width."""
        return self.kda_heads * self.kda_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Query and key width of one MLA head, the unrotated "rope" part included."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
