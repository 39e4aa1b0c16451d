"""Turns the declared storage (dtype, quantisation, prediction layers) into plan hints."""

from __future__ import annotations

from typing import Any

from k3tvm.relax_models.config_reader import Fields, natural, only

Parts = dict[str, Any]


def storage(inner: Fields, outer: Fields, parts: Parts) -> Parts:
    """Storage hints of the text object or, failing that, the outer one.

    The only quantisation is MXFP4 in groups of 32 (specification 4); `parts` holds the expert
    widths, which must then be multiples of 32.
    """
    quantized = [_mxfp4(fields) for fields in (inner, outer)]
    widths = (parts["latent_size"] or parts["hidden_size"], parts["moe_intermediate_size"])
    if any(quantized) and parts["num_experts"] and any(width % 32 for width in widths):
        inner.refuse("quantization_config", "needs expert widths that are multiples of 32")
    dtypes = [_dtype(fields) for fields in (inner, outer)]
    dtype = next((name for name in dtypes if name), "BF16")
    return {
        "mxfp4_experts": any(quantized) and parts["num_experts"] > 0,
        "weight_dtype": dtype,
        "num_mtp_layers": inner.take_or("num_nextn_predict_layers", natural, 0),
    }


def _dtype(fields: Fields) -> str | None:
    """The declared dtype; it only sizes a plan without headers, so other names are no fault."""
    names = {"bfloat16": "BF16", "float32": "F32"}
    found = [fields.take_or(name, str, "") for name in ("dtype", "torch_dtype")]
    return next((names[name] for name in found if name in names), None)


def _mxfp4(fields: Fields) -> bool:
    """Whether the object declares MXFP4 weights; any other quantisation is refused."""
    quant = fields.take_object("quantization_config")
    if quant is None:
        return False
    quant.take("quant_method", only("compressed-tensors"))
    quant.take("format", only("mxfp4-pack-quantized"))
    quant.take_or("kv_cache_scheme", only(None), None)
    for name, group in quant.take("config_groups", _object).items():
        _mxfp4_group(Fields(group if isinstance(group, dict) else {}, f"{quant.where}: {name}"))
    # Which tensors are packed is read from the tensors themselves, never from this list.
    quant.finish(("ignore", "quantization_status", "global_compression_ratio", "version"))
    return True


def _mxfp4_group(group: Fields) -> None:
    group.take_or("format", only("mxfp4-pack-quantized"), "mxfp4-pack-quantized")
    for name in ("input_activations", "output_activations"):
        group.take_or(name, only(None), None)
    weights = group.take_object("weights")
    if weights is None:
        group.need("weights")
        group.refuse("weights", "must be an object")
    weights.take("num_bits", only(4))
    weights.take("type", only("float"))
    weights.take("group_size", only(32))
    weights.take_or("strategy", only("group"), "group")
    weights.take_or("symmetric", only(True), True)
    weights.take_or("dynamic", only(False), False)
    weights.take_or("scale_dtype", only("torch.uint8", "torch.float8_e8m0fnu"), "torch.uint8")
    for name in ("actorder", "block_structure", "zp_dtype"):
        weights.take_or(name, only(None), None)
    weights.finish(("observer", "observer_kwargs"))
    group.finish(("targets",))


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    return value
