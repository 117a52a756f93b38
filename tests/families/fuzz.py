"""Fuzzer: calls random models of random families in random ways, and compares the results with the original.

`python -m tests.families.fuzz --count 200 --seed 0 [NAME ...]` changes the values of tiny configs (widths,
heads, windows, biases, activations, multipliers), and compares forwards, forwards with a cache and generation
with a copy of the original in float32. `--count 1 --seed N` with the same names repeats one case.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import random
import sys
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import slipstream
from slipstream.families import Family, Tiny
from tests.families.sweep import VARIANTS, label, peaked_model

_TOLERANCE = 1e-4
_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads")
_ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "quick_gelu", "relu2")


_CHOICES: tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...] = (
    (("num_hidden_layers", "n_layer", "num_layers", "n_layers"), (1, 2, 3)),
    (("head_dim",), (8, 12, 16, 24, 32)),
    (("hidden_act", "activation_function", "hidden_activation"), _ACTIVATIONS),
    (("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"), (1e-3, 1e-6, 1e-1)),
    (("sliding_window", "window_size", "attention_window"), (1, 2, 3, 7, 40)),
    (("attn_logit_softcapping", "final_logit_softcapping"), (3.0, 20.0, None)),
    (("num_experts", "num_local_experts", "n_routed_experts"), (2, 3, 4, 8)),
    (("num_experts_per_tok", "moe_topk"), (1, 2)),
    (("norm_topk_prob", "use_qk_norm", "qk_layernorm", "parallel_attn", "alibi"), (True, False)),
    (("use_cache", "scale_attn_weights"), (True, False)),
    (("partial_rotary_factor", "rotary_pct"), (0.25, 0.5, 1.0)),
    (("embedding_multiplier", "residual_multiplier", "attention_multiplier"), (0.3, 1.0, 2.5)),
    (("logits_scaling", "logit_scale"), (0.3, 1.0, 2.5)),
)
_WIDTHS = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size")
_ANOTHER_MODEL = ("is_decoder", "is_encoder_decoder", "add_cross_attention", "is_causal", "return_dict")
"""Switches that make the model incompatible with the calls of `calls_of`."""
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
)


def mutate(options: dict[str, Any], config: Any, draw: random.Random) -> dict[str, Any]:
    """Return a config's options with a few values changed, from which a model cannot always be built."""
    changed, known = dict(options), config.to_dict()

    def put(name: str, values: tuple[Any, ...], share: float = 0.3) -> None:
        if name in known and draw.random() < share:
            changed[name] = draw.choice(values)

    for names, values in _CHOICES:
        for name in names:
            put(name, values)
    for name in (name for name in _HEADS if name in known):
        if draw.random() < 0.5:
            heads, width = draw.choice([(1, 16), (2, 32), (3, 48), (4, 64), (5, 40), (6, 48), (8, 64)])
            changed[name] = heads
            changed |= {wide: width for wide in ("hidden_size", "n_embd", "d_model", "dim") if wide in known}
            if isinstance(known.get("num_key_value_heads"), int):
                fits = [count for count in range(1, heads + 1) if heads % count == 0]
                changed["num_key_value_heads"] = draw.choice(fits)
        break
    # torch's grouped matmul, which the originals use, requires rows of a multiple of 16 bytes.
    sparse = any("expert" in name for name in known)
    for name in _WIDTHS:
        put(name, (8, 24, 40, 64) if sparse else (1, 7, 20, 33, 64, 100))
    for name, value in known.items():
        if isinstance(value, bool) and name.endswith(("bias", "tie_word_embeddings")):
            put(name, (True, False))
        elif isinstance(value, bool) and name not in _ANOTHER_MODEL:
            put(name, (not value,), share=0.05)
    if "rope_parameters" in known and draw.random() < 0.3:
        changed["rope_parameters"] = {"rope_theta": 10000.0, **draw.choice(_ROPES)}
    return changed


def calls_of(config: Any, draw: random.Random, vocabulary: int) -> list[tuple[str, Any]]:
    """Return named ways to call a model, each a function that takes the model and returns tensors."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    rows, length = draw.choice([(1, 1), (1, 7), (2, 9), (3, 12), (4, 30), (2, 50)])
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    left, right = torch.ones_like(ids), torch.ones_like(ids)
    for row in range(rows):
        padding = draw.randrange(0, length)
        left[row, :padding] = 0
        right[row, length - padding :] = 0
    plain = torch.ones_like(ids)

    def forward(mask: Tensor, **more: Any) -> Any:
        def run(model: Any) -> Any:
            out = model(input_ids=ids, attention_mask=mask, **more)
            answer = out.logits if hasattr(out, "logits") else out[0]
            return [answer[mask.bool()]]

        return run

    def embedded(model: Any) -> Any:
        states = model.get_input_embeddings()(ids)
        return [model(inputs_embeds=states, attention_mask=left)[0][left.bool()]]

    named_calls: list[tuple[str, Any]] = [
        ("plain", forward(plain)), ("left", forward(left)), ("right", forward(right)),
        ("states", forward(left, output_hidden_states=True)),
        ("no mask", lambda model: [model(ids)[0]]),
        ("embedded", embedded),
    ]  # fmt: skip

    def chunks(model: Any) -> Any:
        cache, answers, start = None, [], 0
        for size in (length // 2, length - length // 2 - 1, 1):
            if size <= 0:
                continue
            out = model(input_ids=ids[:, start : start + size], attention_mask=left[:, : start + size],
                        past_key_values=cache, use_cache=True)  # fmt: skip
            seen = left[:, start : start + size].bool()
            answers.append(out.logits[seen])
            cache, start = out.past_key_values, start + size
        return answers

    def generating(**options: Any) -> Any:
        def run(model: Any) -> Any:
            torch.manual_seed(3)
            out = model.generate(ids, attention_mask=left_alive, max_new_tokens=steps, **options)
            return [out] if isinstance(out, Tensor) else [out.sequences, out.sequences_scores]

        return run

    left_alive = left.clone()
    left_alive[:, -1] = 1
    steps = draw.choice([1, 3, 9, 20])
    beams = {
        "num_beams": 3,
        "num_return_sequences": 2,
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    ends = list(range(3, vocabulary, 3))
    named_calls += [
        ("chunks", chunks),
        ("greedy", generating(do_sample=False)),
        ("penalised", generating(do_sample=False, repetition_penalty=1.4, no_repeat_ngram_size=2)),
        ("minimum", generating(do_sample=False, min_new_tokens=2, eos_token_id=ends, pad_token_id=0)),
        ("beams", generating(do_sample=False, **beams)),
        ("static", generating(do_sample=False, cache_implementation="static")),
        ("uncached", generating(do_sample=False, use_cache=False)),
    ]  # fmt: skip
    return named_calls


def answers(model: Any, run: Any) -> Any:
    """Return the result of a call, or the exception that it raises."""
    try:
        with torch.no_grad(), warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            return run(model)
    except Exception as error:
        return error


def compare(expected: Any, got: Any) -> str:
    """Describe how two results differ; empty if they agree, or if the original raised an exception."""
    if isinstance(expected, Exception):
        return ""
    if isinstance(got, Exception):
        return f"raises {type(got).__name__}: {str(got)[:300]}"
    for theirs, ours in zip(expected, got, strict=True):
        if theirs.shape != ours.shape:
            return f"shape {tuple(ours.shape)} for {tuple(theirs.shape)}"
        if not theirs.is_floating_point():
            if not torch.equal(theirs, ours):
                return f"other tokens: {theirs.tolist()} for {ours.tolist()}"[:300]
        elif theirs.numel() and bool(theirs.isfinite().all()):
            error = float((theirs - ours).abs().max())
            if not error <= _TOLERANCE * max(1.0, float(theirs.abs().max()) / 10):
                return f"off by {error:.2g} of {float(theirs.abs().max()):.2g}"
    return ""


def _tied(expected: Any, got: Any) -> bool:
    """Return whether beams with different tokens have the same scores up to float32 rounding.

    A peaked model repeats one of two tokens forever, and the switch from one to the other scores the same
    at every position.
    """
    return len(got) == 2 and torch.allclose(expected[1], got[1], rtol=1e-6, atol=1e-6)


def _rounds_no_more(original: nn.Module, run: Any, expected: Any, got: Any) -> bool:
    """Return whether the engine's error relative to the original in float64 is close to float32's own.

    The bound is 1.5 times the original's error in float32. Models that run their layers repeatedly amplify
    rounding errors, most of all with squared activations.
    """
    exact = answers(_in_float64(original), run)
    if isinstance(exact, Exception):
        return False
    ours, theirs = (
        max(float((answer - truth).abs().max()) for answer, truth in zip(part, exact, strict=True))
        for part in (got, expected)
    )
    return ours <= 1.5 * theirs


def _in_float64(original: nn.Module) -> nn.Module:
    """Return a float64 copy whose experts run one by one, because torch's grouped matmul lacks float64."""
    wide = copy.deepcopy(original).double()
    for module in wide.modules():
        if hasattr(module, "config"):
            module.config._experts_implementation = "eager"
    return wide


def one(variant: tuple[Family, Tiny], seed: int) -> tuple[str, list[str]]:
    """Make, inject and call a mutated model; return its level (or why there is none) and the problems."""
    draw = random.Random(seed)
    _, tiny = variant
    try:
        base = getattr(transformers, tiny.config)(**tiny.options)
        options = mutate(tiny.options, base, draw)
        with contextlib.redirect_stderr(io.StringIO()):
            original: nn.Module = peaked_model(replace(tiny, options=options), seed=seed)
    except Exception as error:
        return f"unmade: {type(error).__name__}", []
    if original.main_input_name != "input_ids" or getattr(original.config, "is_encoder_decoder", False):
        return "other inputs", []
    changed = {k: v for k, v in options.items() if tiny.options.get(k, "?") != v}
    vocabulary = getattr(original.get_input_embeddings(), "num_embeddings", None)
    if vocabulary is None:
        return "other inputs", []
    try:
        engine = slipstream.init_inference(
            copy.deepcopy(original),
            dtype=torch.float32,
            replace_with_kernel_inject=True,
            injection_check="fallback",
        )
    except Exception as error:
        return "refused", [f"init {type(error).__name__}: {str(error)[:300]} {changed}"]
    wrong = []
    calls = calls_of(original.config, draw, vocabulary)
    for name, run in calls:
        if name != "plain" and draw.random() < 0.5:
            continue
        expected, got = answers(original, run), answers(engine, run)
        problem = compare(expected, got)
        if problem.startswith("other tokens") and _tied(expected, got):
            continue
        # GPT-Neo's windows are wrong with a static cache: the answer is what it gives with a growing one.
        if problem and name == "static" and not compare(answers(original, dict(calls)["greedy"]), got):
            continue
        if problem and not (problem.startswith("off") and _rounds_no_more(original, run, expected, got)):
            wrong.append(f"{name}: {problem} {changed}")
    report = engine.report()
    if report.level != "block":
        reasons = {layer.reason for layer in report.layers if layer.reason}
        return report.level, [*wrong, f"level {report.level}: {sorted(reasons)[:2]} {changed}"]
    return report.level, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of variants' labels; all where none is given")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    variants = [v for v in VARIANTS if not given.names or any(n in label(v) for n in given.names)]
    seen: Counter[str] = Counter()
    bad = 0
    for seed in range(given.seed, given.seed + given.count):
        variant = random.Random(seed).choice(variants)
        level, wrong = one(variant, seed)
        seen[level] += 1
        for line in wrong:
            bad += 1
            print(f"[{label(variant)} seed {seed}] {line}", flush=True)
    print(dict(seen), f"{bad} to look at")
    return 0


if __name__ == "__main__":
    sys.exit(main())
