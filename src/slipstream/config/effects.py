"""What every field does in Slipstream, as data: the documentation is made of it, the configuration obeys it.

`acts`: the value is honoured. `warns`: a value other than the default changes nothing, and a warning says so.
`refused`: a value other than the default is an error. `unserved`: it is understood and checked, and building
    an engine
with it is an error in this version. Moving a field between kinds is one word here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EFFECTS", "Effect", "Kind"]

Kind = Literal["acts", "warns", "refused", "unserved"]


@dataclass(frozen=True)
class Effect:
    """What a field does, in a word and in a sentence."""

    kind: Kind
    sentence: str


def _acts(sentence: str) -> Effect:
    return Effect("acts", sentence)


def _warns(sentence: str) -> Effect:
    return Effect("warns", sentence)


def _refused(sentence: str) -> Effect:
    return Effect("refused", sentence)


def _unserved(sentence: str) -> Effect:
    return Effect("unserved", sentence)


_GROUPWISE = "Use quant.weight.format with quant.weight.q_groups; weights are packed while they stream in."
_WHOLE_LAYERS = "Weights are streamed by whole layers; use zero.offload_param.buffer_count."

_TOP = {
    "replace_with_kernel_inject": _acts(
        "True replaces every layer whose class has a family by a fused block, and known parts of the others; "
        "the report says what was replaced, and where that is nothing a warning names the layer classes."
    ),
    "dtype": _acts(
        "The model is converted to it; a folder of packed weights has its own, which is used where none is "
        "given. int8 means int8 weights, multiplied in bfloat16 where the model comes in half precision, and "
        "else in its own float."
    ),
    "enable_cuda_graph": _acts(
        "Decode steps of generate are captured once for each of a few batch sizes and replayed, upon a cache "
        "that stays reserved, and so are single prompts of up to 527 tokens, filled up to one of nine sizes, "
        "when a size is met again; what cannot be captured, and any device without graphs, runs as ever, and "
        "the report has the reason. Forwards without a cache are captured once per shape of their inputs."
    ),
    "use_triton": _unserved(
        "True makes a missing Triton an error; otherwise Triton kernels are used where they are found."
    ),
    "triton_autotune": _unserved(
        "True times the variants of each Triton kernel at the first use of a shape; it needs use_triton."
    ),
    "triangular_masking": _acts(
        "False is refused unless the model is bidirectional: the engine takes the mask from the model."
    ),
    "keep_module_on_host": _acts(
        "True leaves the weights in host memory instead of moving them to the device."
    ),
    "injection_check": _acts(
        '"error" raises when a replaced layer disagrees with the original, "fallback" keeps the original and '
        'reports it, "off" does not compare.'
    ),
    "kv_cache_dtype": _acts(
        "int8 keeps the keys and values of the engine's own generate as codes with a float32 scale per "
        "token and kv head: about half the bytes of bfloat16, each value off by at most 1/254 of the largest "
        "of its head. A cache that is returned is in the engine's dtype. Without an engine road it warns."
    ),
    "screen_vocabulary": _acts(
        "On a CPU, once the first tokens have shown that it pays, greedy steps of one sequence read the "
        "vocabulary projection in 5 bits per weight and compute those tokens alone that may be the best. "
        "Tokens are the same; the sketch takes memory of its own, which False saves."
    ),
    "checkpoint": _acts(
        "Weights are read from it, layer by layer as they are packed, and every tensor is accounted for, "
        "with and without injection. A folder, a file, a tagged folder of ranks, or DeepSpeed's description. "
        "Tensors that the model ties and the checkpoint has apart, with different values, are not tied."
    ),
    "base_dir": _acts(
        "Relative file names of a checkpoint are looked up in it; without a checkpoint it warns."
    ),
    "set_empty_params": _warns(
        "Injected layers are always built empty and filled as their weights stream in."
    ),
    "save_mp_checkpoint_path": _acts(
        "After loading, the weights are written there: packed ones as they are held, plain ones as "
        "safetensors with a description. The folder loads again as a checkpoint."
    ),
    "return_tuple": _acts(
        "False makes forward return the plain first tensor in place of the model's output object."
    ),
    "training_mp_size": _acts(
        "Says how many ways a checkpoint is split when its files do not; without a checkpoint it warns."
    ),
    "injection_policy": _acts(
        "The linears and norms of its layers run the engine's ops, and on several ranks the results of the "
        "named linears are added up; a family in place of names fuses a layer whole. A name that matches "
        "nothing, or replace_with_kernel_inject beside it, is an error."
    ),
    "injection_policy_tuple": _warns("It is internal to DeepSpeed; give injection_policy."),
    "config": _acts(
        "Its entries override the model's own configuration, by which fused layers are made; modules that "
        "were built already keep their numbers, and a fused layer that answers otherwise by them is an error."
    ),
    "max_out_tokens": _acts("A request whose prompt and new tokens exceed it is refused before it starts."),
    "min_out_tokens": _acts(
        "A request for which fewer tokens than this fit is refused; at most max_out_tokens."
    ),
    "transposed_mode": _refused("It serves the hybrid engine for training only; leave it out."),
    "replace_method": _warns('Deprecated; its only value is "auto", and replace_with_kernel_inject decides.'),
    "mp_size": _acts(
        "Deprecated: moved to tensor_parallel.tp_size with a warning; both together are refused."
    ),
    "mpu": _acts("Deprecated: moved to tensor_parallel.mpu with a warning; both together are refused."),
    "ep_size": _acts("Deprecated: moved to moe.ep_size with a warning; both together are refused."),
    "ep_group": _acts("Deprecated: moved to moe.ep_group with a warning; both together are refused."),
    "ep_mp_group": _acts("Deprecated: moved to moe.ep_mp_group with a warning; both together are refused."),
    "moe_experts": _acts("Deprecated: moved to moe.moe_experts with a warning; both together are refused."),
    "moe_type": _acts("Deprecated: moved to moe.type with a warning; both together are refused."),
}

_PARALLEL = {
    "tensor_parallel": _acts("Splits each layer over ranks, with or without kernel injection."),
    "tensor_parallel.enabled": _acts("False beside a tp_size above 1 is refused as a contradiction."),
    "tensor_parallel.tp_size": _acts(
        "Ranks per layer; each keeps only its share of the weights. With more processes than this (times "
        "moe.ep_size) the model is replicated, each replica with prompts of its own."
    ),
    "tensor_parallel.tp_grain_size": _acts(
        "In layers that run their own code, and where heads do not decide, parts end at multiples of it, "
        "unless a rank would have over a tenth more than its share; then they are cut as evenly as it goes."
    ),
    "tensor_parallel.mpu": _acts(
        "Its get_tensor_model_parallel_group(), or get_model_parallel_group(), is the group that is used."
    ),
    "tensor_parallel.step_timeout": _acts(
        "A rank that hangs for longer, or a network that loses what is sent, ends the others with an "
        "error, where experts are spread as well. A process that ended is noticed at once. Groups that you "
        "made keep the timeout that they were made with."
    ),
    "tensor_parallel.tp_group": _acts(
        "Layers are split over this group instead of one made for the engine; tp_size may be left out."
    ),
    "moe": _acts("Spreads the experts of fused blocks over ranks; a model without any is refused."),
    "moe.enabled": _acts("False beside an ep_size above 1 is refused as a contradiction."),
    "moe.ep_size": _acts(
        "Places that experts are spread over, as evenly as they go. With tp_size times this many processes, "
        "or a multiple, each expert is split over tp_size ranks; with fewer, the ranks that split layers "
        "spread experts as well. Ranks that only share experts may each have prompts of their own."
    ),
    "moe.moe_experts": _warns("The number of experts is read from the model."),
    "moe.type": _warns("The model's own router and shared experts decide how experts are combined."),
    "moe.ep_mp_group": _acts(
        "It must have the ranks that split an expert by the sizes and groups beside it, which decide."
    ),
    "moe.ep_group": _acts(
        "Experts are spread over this group instead of one made for the engine; ep_size may be left out."
    ),
}

_QUANT = {
    "quant": _acts(
        "In force once anything is set in it that does not switch it off; untouched, weights stay plain."
    ),
    "quant.enabled": _acts("False switches the whole section off; True alone means int8 weights."),
    "quant.activation": _acts("In force as soon as anything is set in it and `enabled` stays True."),
    "quant.activation.enabled": _acts(
        "True, when set, rounds each row that enters an int8 linear of the layers to 8 bits, with a scale of "
        "its own. Beside fp8 weights it acts on GPUs that multiply fp8 (compute capability 8.9 and later), "
        "where products of more than 128 rows take rows rounded to e4m3; elsewhere rows stay as they are, "
        "and the report says so. Beside plain weights, and those of another format, it is refused. Experts "
        "that lie in one tensor and the vocabulary projection read rows as they are."
    ),
    "quant.activation.num_bits": _acts("8; the widths 4 and 6 are refused, for no matmul takes them."),
    "quant.activation.q_type": _acts("Symmetric: codes -127 to 127; asymmetric: 0 to 255 with a zero point."),
    "quant.activation.q_groups": _acts(
        "Groups of an input row with a scale of their own, a divisor of the hidden width; more than one runs "
        "in plain torch, which is slow."
    ),
    "quant.weight": _acts(
        "Chooses the format that the linears of the layers are packed into, with and without injection; "
        "routers stay plain."
    ),
    "quant.weight.enabled": _acts("False leaves weights plain."),
    "quant.weight.num_bits": _acts(
        "Without a format: 8 is int8, 4 is int4, 6 is fp6; with one it must agree."
    ),
    "quant.weight.q_type": _acts(
        "Only int4 has a choice: given as symmetric its groups have no minimum, left out or asymmetric they "
        "have one. Asymmetric beside another format is refused."
    ),
    "quant.weight.q_groups": _acts(
        "1 means the format's own groups: rows, 32 inputs with int4, 64 with fp6. More means int4 in groups "
        "of the hidden width divided by it, which must be 32, 64 or 128 inputs; anything else is refused."
    ),
    "quant.weight.format": _acts(
        "int8, int4, fp8, fp6 (e2m3), fp6-e3m2, or bf13, which has the numbers of bfloat16 themselves."
    ),
    "quant.weight.quantized_initialization": _refused(_GROUPWISE),
    "quant.weight.post_init_quant": _refused(_GROUPWISE),
    "quant.qkv": _acts("Exempts one projection of every block."),
    "quant.qkv.enabled": _acts("False leaves the projection of query, key and value plain."),
    "quant.head": _acts(
        "Packs the vocabulary projection, which every new token reads whole: to int8 whatever the format of "
        "the layers, or to bf13 beside that; none or False leaves it plain. A projection that is tied to "
        "the embedding gets planes of its own, and the embedding keeps the tensor. With "
        "`quant.weight.enabled=False` it still applies if it is set explicitly."
    ),
    "quant.embedding": _acts(
        "Packs the token embedding, whose rows are unpacked as they are looked up. A projection that is tied "
        "to it shares its planes, unless quant.head asks for another format, and the tensor is freed."
    ),
}

_ZERO = {
    "zero": _acts(
        "Streams weights that do not fit; keys that only training could honour are refused by name."
    ),
    "zero.stage": _acts(
        "Stage 3 goes with offload_param; any other beside it is refused, and alone a stage warns."
    ),
    "zero.offload_param": _acts(
        "Each layer is brought into a buffer before it runs and the next ones meanwhile; what stands around "
        "the layers stays. Only fused blocks are streamed; beside enable_cuda_graph it is refused."
    ),
    "zero.offload_param.device": _acts(
        "On the CPU, cpu and nvme both leave weights in files: the checkpoint's own, where they lie there as "
        "they are needed. On a GPU, cpu keeps them in host memory. A model that is in memory "
        "already is only written to files by nvme; with cpu it warns."
    ),
    "zero.offload_param.nvme_path": _acts(
        "What has to be written, because it is converted, packed, or on another disk, lies in a file without "
        "a name in this folder, which goes with the process; without it, where temporary files are. Needed "
        "with device nvme, refused otherwise."
    ),
    "zero.offload_param.pin_memory": _acts(
        "Locks the host memory that weights stay in, or pass on their way to a GPU; without a GPU it does "
        "nothing, and without a device it warns."
    ),
    "zero.offload_param.buffer_count": _acts(
        "Layers held on the device: one in use, the others being fetched."
    ),
    "zero.offload_param.buffer_size": _warns(_WHOLE_LAYERS),
    "zero.offload_param.max_in_cpu": _warns("The operating system keeps in memory what it has room for."),
    "zero.prefetch_bucket_size": _warns(_WHOLE_LAYERS),
    "zero.param_persistence_threshold": _acts(
        "Matrices with fewer elements stay on the device, as norms and biases do; left out, all are streamed."
    ),
    "zero.model_persistence_threshold": _warns(_WHOLE_LAYERS),
    "zero.max_live_parameters": _warns(_WHOLE_LAYERS),
    "zero.max_reuse_distance": _warns(_WHOLE_LAYERS),
}

_CHECKPOINT = {
    "checkpoint_config": _acts("Fills three fields of the top level; a different value in both is an error."),
    "checkpoint_config.checkpoint_dir": _acts("The same as `checkpoint`."),
    "checkpoint_config.save_mp_checkpoint_path": _acts("The same as `save_mp_checkpoint_path`."),
    "checkpoint_config.base_dir": _acts("The same as `base_dir`."),
}

EFFECTS: dict[str, Effect] = {**_TOP, **_PARALLEL, **_QUANT, **_ZERO, **_CHECKPOINT}
"""Every field by its dotted name."""
