"""What every field does in Slipstream, as data: the documentation and the checks are generated from it.

`acts`: the value takes effect. `warns`: a value other than the default has no effect, and gives a warning.
`refused`: a value other than the default is an error. `unserved`: the value is checked, but building an
engine with it is an error in this version. To change a field's kind, change one word here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["EFFECTS", "Effect", "Kind"]

Kind = Literal["acts", "warns", "refused", "unserved"]


@dataclass(frozen=True)
class Effect:
    """What a field does: its kind, and a sentence for the documentation."""

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


_GROUPWISE = "Use quant.weight.format with quant.weight.q_groups; weights are packed while they are loaded."
_WHOLE_LAYERS = "Weights are streamed by whole layers; use zero.offload_param.buffer_count."

_TOP = {
    "replace_with_kernel_inject": _acts(
        "True replaces every layer of a known family with a fused block, and known parts of other layers. "
        "The report lists what was replaced; if nothing was, a warning names the layer classes."
    ),
    "dtype": _acts(
        "The model is converted to it. A folder of packed weights has its own dtype, used when none is "
        "given. int8 means int8 weights, computed in bfloat16 if the model is in half precision, and in the "
        "model's own float type otherwise."
    ),
    "enable_cuda_graph": _acts(
        "Decode steps of generate are captured once for each of a few batch sizes and replayed over a "
        "reserved cache. Single prompts of up to 527 tokens are padded to one of nine sizes, captured when "
        "a size is seen again. Forwards without a cache are captured once per input shape. What cannot be "
        "captured, and any device without graphs, runs as usual, and the report has the reason."
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
        '"error" raises when a replaced layer disagrees with the original, "fallback" keeps the original '
        'and reports it, "off" skips the comparison.'
    ),
    "kv_cache_dtype": _acts(
        "int8 quantizes the KV cache of the engine's own generate, with a float32 scale per token and kv "
        "head: about half the bytes of bfloat16, each value off by at most 1/254 of the largest of its "
        "head. A returned cache is in the engine's dtype. On a CPU, layers with latent attention then run "
        "one at a time. Where transformers' loop generates, it warns."
    ),
    "screen_vocabulary": _acts(
        "On a CPU, greedy decoding of one sequence reads the vocabulary projection in 5 bits per weight and "
        "computes only the tokens that could be the best, once the first tokens have shown that it pays. "
        "Tokens are the same. False saves the memory of this copy."
    ),
    "checkpoint": _acts(
        "A folder, a file, a tagged folder of ranks, or DeepSpeed's description. Weights are read layer by "
        "layer as they are packed, with and without injection, and every tensor must be accounted for. "
        "Tensors that the model ties but the checkpoint holds with different values are not tied."
    ),
    "base_dir": _acts(
        "Relative file names of a checkpoint are looked up here; without a checkpoint it warns."
    ),
    "set_empty_params": _warns(
        "Injected layers are always built empty and filled as their weights are loaded."
    ),
    "save_mp_checkpoint_path": _acts(
        "The loaded weights are written there: packed ones as they are held, plain ones as safetensors with "
        "a description. The folder loads again as a checkpoint."
    ),
    "return_tuple": _acts(
        "False makes forward return the first tensor instead of the model's output object."
    ),
    "training_mp_size": _acts(
        "Says how many ways a checkpoint is split if its files do not; without a checkpoint it warns."
    ),
    "injection_policy": _acts(
        "The linears and norms of the named layer classes run the engine's ops; on several ranks the "
        "outputs of the named linears are summed. A family instead of names fuses the whole layer. A name "
        "that matches nothing, or replace_with_kernel_inject beside it, is an error."
    ),
    "injection_policy_tuple": _warns("It is internal to DeepSpeed; give injection_policy."),
    "config": _acts(
        "Its entries override the model's configuration, from which fused layers are built. As a keyword "
        "argument of init_inference it is args, because config is the whole configuration there. Modules "
        "that exist already keep their values, and a fused layer that gives another output because of it "
        "is an error."
    ),
    "max_out_tokens": _acts("A request whose prompt and new tokens exceed it is refused before it starts."),
    "min_out_tokens": _acts(
        "A request with room for fewer tokens than this is refused; must be at most max_out_tokens."
    ),
    "transposed_mode": _refused("It is for the hybrid training engine only; leave it out."),
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
    "tensor_parallel.enabled": _acts("False with a tp_size above 1 is refused as a contradiction."),
    "tensor_parallel.tp_size": _acts(
        "Each rank keeps only its share of a layer's weights. With more processes than this (times "
        "moe.ep_size) the model is replicated, and each replica takes its own prompts."
    ),
    "tensor_parallel.tp_grain_size": _acts(
        "In layers that run their own code, parts that heads do not determine end at multiples of it, "
        "unless a rank would have over a tenth more than its share; then they are split as evenly as "
        "possible."
    ),
    "tensor_parallel.mpu": _acts(
        "Its get_tensor_model_parallel_group(), or get_model_parallel_group(), is the group that is used."
    ),
    "tensor_parallel.step_timeout": _acts(
        "If a rank hangs for longer, or the network loses messages, the other ranks end with an error; also "
        "with expert parallelism. A process that exited is noticed at once. Groups that you made keep "
        "their own timeout."
    ),
    "tensor_parallel.tp_group": _acts(
        "Layers are split over this group instead of one made for the engine; tp_size may be left out."
    ),
    "moe": _acts("Spreads the experts of fused blocks over ranks; a model without experts is refused."),
    "moe.enabled": _acts("False with an ep_size above 1 is refused as a contradiction."),
    "moe.ep_size": _acts(
        "Experts are spread over this many places, as evenly as possible. With tp_size times this many "
        "processes, or a multiple, each expert is split over tp_size ranks. With fewer, the ranks that "
        "split layers spread the experts as well. Ranks that only share experts may each have their own "
        "prompts."
    ),
    "moe.moe_experts": _warns("The number of experts is read from the model."),
    "moe.type": _warns("The model's own router and shared experts decide how experts are combined."),
    "moe.ep_mp_group": _acts(
        "Must contain the ranks that split an expert according to the other sizes and groups, which decide."
    ),
    "moe.ep_group": _acts(
        "Experts are spread over this group instead of one made for the engine; ep_size may be left out."
    ),
}

_QUANT = {
    "quant": _acts(
        "Active once anything is set in it that does not switch it off; by default weights stay plain."
    ),
    "quant.enabled": _acts("False switches the whole section off; True alone means int8 weights."),
    "quant.activation": _acts("Active as soon as anything is set in it and `enabled` stays True."),
    "quant.activation.enabled": _acts(
        "True, when set, quantizes each input row of the layers' int8 and int4 linears to 8 bits, with its "
        "own scale. With fp8 weights it acts on GPUs with fp8 matmuls (compute capability 8.9 and later), "
        "where products of more than 128 rows round rows to e4m3; elsewhere it has no effect, and the "
        "report says so. It is refused with plain weights and with other formats. Inputs of experts stored "
        "in one tensor and of the vocabulary projection are not quantized."
    ),
    "quant.activation.num_bits": _acts("8; 4 and 6 are refused, because no matmul takes them."),
    "quant.activation.q_type": _acts("Symmetric: codes -127 to 127; asymmetric: 0 to 255 with a zero point."),
    "quant.activation.q_groups": _acts(
        "Number of groups of an input row, each with its own scale; a divisor of the hidden width. More "
        "than one runs in plain torch, which is slow."
    ),
    "quant.weight": _acts(
        "Chooses the format that the layers' linears are packed into, with and without injection. Routers "
        "stay plain."
    ),
    "quant.weight.enabled": _acts("False leaves weights plain."),
    "quant.weight.num_bits": _acts(
        "Without a format: 8 is int8, 4 is int4, 6 is fp6. With a format it must agree."
    ),
    "quant.weight.q_type": _acts(
        "Only int4 has a choice: groups have a minimum, unless symmetric is given. Asymmetric with another "
        "format is refused."
    ),
    "quant.weight.q_groups": _acts(
        "1 means the format's own groups: rows, 32 inputs with int4, 64 with fp6. More means int4 in groups "
        "of the hidden width divided by it, which must be 32, 64 or 128 inputs; anything else is refused."
    ),
    "quant.weight.format": _acts(
        "int8, int4, fp8, fp6 (e2m3), fp6-e3m2, or bf13, which holds exact bfloat16 values."
    ),
    "quant.weight.quantized_initialization": _refused(_GROUPWISE),
    "quant.weight.post_init_quant": _refused(_GROUPWISE),
    "quant.qkv": _acts("Exempts one projection of every block."),
    "quant.qkv.enabled": _acts("False leaves the projection of query, key and value plain."),
    "quant.head": _acts(
        "Packs the vocabulary projection, which every new token reads whole: to int8 whatever the format of "
        "the layers, or to bf13 with bf13. none or False leaves it plain. A projection tied to the "
        "embedding gets its own planes, and the embedding keeps the tensor. If set explicitly, it applies "
        "even with `quant.weight.enabled=False`."
    ),
    "quant.embedding": _acts(
        "Packs the token embedding; rows are dequantized as they are looked up. A projection tied to it "
        "shares its planes, unless quant.head asks for another format, and the tensor is freed."
    ),
}

_ZERO = {
    "zero": _acts(
        "Streams weights that do not fit; keys that only make sense for training are refused by name."
    ),
    "zero.stage": _acts(
        "Stage 3 goes with offload_param; any other stage with it is refused. A stage alone warns."
    ),
    "zero.offload_param": _acts(
        "Each layer is brought into a buffer before it runs, the next ones meanwhile; embedding, final norm "
        "and head stay in memory. Only fused blocks are streamed; with enable_cuda_graph it is refused."
    ),
    "zero.offload_param.device": _acts(
        "On a CPU, cpu and nvme both leave weights in files: the checkpoint's own files where they hold the "
        "weights as needed. On a GPU, cpu keeps weights in host memory. A model that is already in memory "
        "is only written to files by nvme; with cpu it warns."
    ),
    "zero.offload_param.nvme_path": _acts(
        "Weights that must be written, because they are converted, packed or on another disk, go to an "
        "unnamed file in this folder that vanishes with the process; without it, to the system's temporary "
        "folder. Required with device nvme, refused otherwise."
    ),
    "zero.offload_param.pin_memory": _acts(
        "Page-locks the host memory that weights stay in or pass through on the way to a GPU. Without a GPU "
        "it does nothing; without a device it warns."
    ),
    "zero.offload_param.buffer_count": _acts(
        "Layers held on the device: one in use, the others being fetched."
    ),
    "zero.offload_param.buffer_size": _warns(_WHOLE_LAYERS),
    "zero.offload_param.max_in_cpu": _warns("The operating system decides what stays in memory."),
    "zero.prefetch_bucket_size": _warns(_WHOLE_LAYERS),
    "zero.param_persistence_threshold": _acts(
        "Matrices with fewer elements stay on the device, as norms and biases do. Unless it is set, all "
        "matrices are streamed."
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
