"""What ranks do in tests: each function runs on every rank of the pool at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import slipstream
from slipstream.devices import NullDevice
from slipstream.model.selfcheck.inputs import sample_inputs, vocabulary
from slipstream.model.weights.packed import is_packed, packed_bytes, packed_matrices
from tests.families.sweep import NEW_TOKENS, VARIANTS, batch, label, peaked_model
from tests.parallel.pool import GROUPS
from tests.parallel.share_jobs import share

LLAMA = next(index for index, variant in enumerate(VARIANTS) if label(variant) == "llama")


def group(size: int) -> Any:
    """The first ranks as a group that a user would have made."""
    return GROUPS[size]


def split(model: nn.Module, size: int, **settings: Any) -> slipstream.InferenceEngine:
    """An engine on the first `size` ranks."""
    settings = {"dtype": torch.float32, "tensor_parallel": {"tp_group": group(size)}, **settings}
    return slipstream.init_inference(model, **settings)


def parameter_bytes(engine: slipstream.InferenceEngine) -> int:
    """Bytes of a rank's parameters, of injected layers as their blocks hold them."""
    layers = {row.name: row.bytes for row in engine.report().layers}
    inside = sum(packed_bytes(engine.module.get_submodule(name)) for name in layers)
    whole = packed_bytes(engine.module)
    return whole - inside + sum(layers.values())


def sweep(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """One tiny model of a family on several ranks, beside itself in one process."""
    family, tiny = VARIANTS[index]
    original = peaked_model(tiny)
    engine = split(copy.deepcopy(original), size, **settings)
    ranks, reference = size, original
    if dist.get_rank() == 0 and packs(settings):
        alone = {"dtype": torch.float32, **settings}
        reference = slipstream.init_inference(copy.deepcopy(original), **alone)
    errors, greedy = [], "-"
    pair = bool(getattr(original.config, "is_encoder_decoder", False))
    generates = getattr(original, "can_generate", lambda: False)() and hasattr(original, "generate")
    with torch.no_grad():
        for given, rows in inputs_of(original):
            torch.manual_seed(1)  # some shuffle their patches
            expected = from_first(ranks, lambda given=given: answer_of(reference(**given)))
            torch.manual_seed(1)
            got = answer_of(engine(**given))
            error = (expected - got).abs()
            # As in the sweep of one process, logits of pairs count relative to their size.
            unit = max(float(expected.abs().max()), 1.0) if pair else 1.0
            errors.append(float((error if rows is None else error[rows.bool()]).max()) / unit)
        if generates:
            given = {n: t for n, t in inputs_of(original)[0][0].items() if not n.startswith("decoder_")}
            options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
            chosen = from_first(ranks, lambda: reference.generate(**given, **options))
            same = torch.equal(chosen, engine.generate(**given, **options))
            greedy = "identical" if same else "DIFFERENT"
    return {
        "family": f"{family.name} {tiny.label}".strip(),
        "level": engine.report().level,
        "error": max(errors),
        "greedy": greedy,
        "share": share(engine, original, size, settings),
        "road": "compatible" if engine.why_compatible() else "engine",
    }


def packs(settings: dict[str, Any]) -> bool:
    """Whether settings round the weights."""
    return bool(settings.get("quant")) or settings.get("dtype") in (torch.int8, "int8")


def off_float64(index: int, size: int, settings: dict[str, Any]) -> tuple[float, float]:
    """How far ranks, and one process, are from the model in float64.

    Where weights are packed, all three have the packed ones.
    """
    original = peaked_model(VARIANTS[index][1])
    engine = split(copy.deepcopy(original), size, **settings)
    reference, exact = original, copy.deepcopy(original)
    if packs(settings):
        reference = slipstream.init_inference(copy.deepcopy(original), **{"dtype": torch.float32, **settings})
        exact.load_state_dict(reference.state_dict())
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # torch has no grouped products in float64
    exact.double()
    pair = bool(getattr(original.config, "is_encoder_decoder", False))
    errors: list[tuple[float, float]] = []
    with torch.no_grad():
        for given, rows in inputs_of(original):
            wide = {n: t.double() if t.is_floating_point() else t for n, t in given.items()}
            expected, real = answer_of(exact(**wide)), slice(None) if rows is None else rows.bool()
            unit = max(float(expected.abs().max()), 1.0) if pair else 1.0
            got = (answer_of(model(**given)).double() for model in (engine, reference))
            ours, theirs = (float((answer - expected).abs()[real].max()) / unit for answer in got)
            errors.append((ours, theirs))
    return max(ours for ours, _ in errors), max(theirs for _, theirs in errors)


def from_first(size: int, make: Callable[[], Tensor]) -> Tensor:
    """What the first rank makes, for all of them: what one process says is computed once."""
    held = [make() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held, 0, group(size))
    assert held[0] is not None
    return held[0]


def inputs_of(model: Any) -> list[tuple[dict[str, Tensor], Tensor | None]]:
    """Inputs of a model by name, and which positions count."""
    pair = getattr(model.config, "is_encoder_decoder", False)
    samples = sample_inputs(model)
    if not (pair or samples):
        ids, left, right = batch(vocabulary(model) or 64)
        return [({"input_ids": ids, "attention_mask": mask}, mask) for mask in (left, right)]
    generator = torch.Generator().manual_seed(7)
    if pair:
        words, _, right = batch(64)
        entries = samples or [{"input_ids": words, "attention_mask": right}]
        rows = len(next(iter(entries[0].values())))
        samples = [{**entry, "decoder_input_ids": words[:rows, :7]} for entry in entries]
    assert samples, f"no input is made for {type(model).__name__}"
    return [
        (
            {
                name: torch.randn(t.shape, generator=generator) if t.is_floating_point() else t
                for name, t in sample.items()
            },
            None,
        )
        for sample in samples
    ]


def answer_of(output: Any) -> Tensor:
    """Logits, or what a model without a head says."""
    answer: Tensor = output.logits if hasattr(output, "logits") else output[0]
    return answer


def report(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What each rank holds of a model, beside what one process holds."""
    model = peaked_model(VARIANTS[index][1])
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    layers = [p for n, p in model.named_parameters() if ".layers." in n or ".h." in n]
    norms = sum(p.numel() * p.element_size() for p in layers if p.dim() == 1)
    engine = split(model, size, **settings)
    return {"whole": whole, "norms": norms, "own": parameter_bytes(engine), "text": str(engine.report())}


def sampled(index: int, size: int) -> list[list[int]]:
    """Sampled tokens after every rank was left with other random numbers."""
    engine = split(peaked_model(VARIANTS[index][1]), size, replace_with_kernel_inject=True)
    torch.manual_seed(100 + dist.get_rank())
    ids, left, _ = batch(engine.get_input_embeddings().weight.shape[0])
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "temperature": 1.5, "max_new_tokens": 10}
    fast = engine.generate(ids, attention_mask=left, **options)
    slow = engine.generate(ids, attention_mask=left, num_beams=2, **options)
    return [fast.flatten().tolist(), slow.flatten().tolist()]


def state_dicts(index: int, size: int) -> float:
    """Largest difference between the model's tensors and those that the ranks put together again."""
    model = peaked_model(VARIANTS[index][1])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = split(model, size, replace_with_kernel_inject=True).state_dict()
    assert found.keys() == expected.keys()
    return max(float((found[name].float() - tensor.float()).abs().max()) for name, tensor in expected.items())


def attention_maps(index: int, size: int) -> float:
    """Error of a forward that only the original code can serve, which the ranks put together for it."""
    model = peaked_model(VARIANTS[index][1])
    model.set_attn_implementation("eager")
    original = copy.deepcopy(model)
    engine = split(model, size, replace_with_kernel_inject=True)
    ids, left, _ = batch(original.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=left, output_attentions=True)
        got = engine(input_ids=ids, attention_mask=left, output_attentions=True)
    assert len(got.attentions) == len(expected.attentions)
    return max(float((a - b).abs().max()) for a, b in zip(expected.attentions, got.attentions, strict=True))


def replicas(index: int) -> list[Any]:
    """Two replicas of two ranks, each with a prompt of its own: own tokens beside one process's."""
    original = peaked_model(VARIANTS[index][1])
    engine = slipstream.init_inference(
        copy.deepcopy(original), dtype="fp32", tensor_parallel={"tp_size": 2}, replace_with_kernel_inject=True
    )
    mine = torch.tensor([[5, 6, 7 + dist.get_rank() // 2, 9]])
    options: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    return [engine.generate(mine, **options).tolist(), original.generate(mine, **options).tolist()]


def disagreeing(size: int, what: str) -> None:
    """Ranks of which the last one does something else."""
    odd = dist.get_rank() == size - 1
    model = peaked_model(VARIANTS[LLAMA][1], seed=1 if odd and what == "weights" else 0)
    settings: dict[str, Any] = {"max_out_tokens": 99} if odd and what == "config" else {}
    if odd and what == "entry":
        model.config.rms_norm_eps = 0.5
    engine = split(model, size, replace_with_kernel_inject=True, **settings)
    ids = torch.tensor([[5, 6, 7]])
    if what == "prompt":
        engine.generate(ids + int(odd), max_new_tokens=2)
    elif what == "forward":
        engine(ids + int(odd))
    elif what == "option":
        engine.generate(ids, max_new_tokens=2 + int(odd))
    elif what == "settings":
        engine.generation_config.eos_token_id = 7 if odd else 6
        engine.generate(ids, max_new_tokens=2)
    elif what == "call":
        _ = engine(ids) if odd else engine.generate(ids, max_new_tokens=2)


def sized_by(settings: dict[str, Any]) -> str:
    """An engine by sizes alone, on all ranks of the pool; its report."""
    model = peaked_model(VARIANTS[LLAMA][1])
    engine = slipstream.init_inference(model, dtype="fp32", replace_with_kernel_inject=True, **settings)
    return str(engine.report())


def foreign_group() -> str:
    """A group that the last rank does not belong to."""
    return sized_by({"tensor_parallel": {"tp_group": group(3)}})


class Mpu:
    """An object that knows the model-parallel group, as Megatron has one."""

    def __init__(self, ranks: Any) -> None:
        self.ranks = ranks

    def get_model_parallel_group(self) -> Any:
        return self.ranks


def by_mpu(size: int) -> str:
    return sized_by({"tensor_parallel": {"mpu": Mpu(group(size))}})


def held(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """What a rank holds of a model that runs its own code, what it should, and what the report says."""
    model = peaked_model(VARIANTS[index][1])
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    everywhere = {id(t.weight): t.weight for t in tables} | {
        id(p): p for p in model.parameters() if p.dim() < 2
    }
    token = model.get_input_embeddings().weight
    everywhere.pop(id(token))
    shared = sum(p.numel() * p.element_size() for p in everywhere.values())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = split(model, size, **settings)
    rows = [(row.name, row.how, row.source) for row in engine.report().split]
    fair = (whole - shared) / size + shared
    tensors = {p.data_ptr(): p for p in engine.module.parameters() if not p.is_meta and p.stride() != (0, 0)}
    for module in filter(is_packed, engine.module.modules()):
        planes = (plane for weight, _ in packed_matrices(module).values() for plane in weight.planes)
        tensors |= {plane.data_ptr(): plane for plane in planes}
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    return {"fair": fair, "own": own, "rows": rows, "text": str(engine.report())}


def own_state(index: int, size: int, settings: dict[str, Any]) -> float:
    """Largest difference between a model's tensors and those of its engine's state dict."""
    model = peaked_model(VARIANTS[index][1])
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = split(model, size, **settings).state_dict()
    assert found.keys() == expected.keys()
    return max(float((found[name].float() - tensor.float()).abs().max()) for name, tensor in expected.items())


def own_maps(index: int, size: int) -> float:
    """Error of the attention maps of layers that run their own code."""
    model = peaked_model(VARIANTS[index][1])
    model.set_attn_implementation("eager")
    original = copy.deepcopy(model)
    engine = split(model, size)
    ids, left, _ = batch(original.get_input_embeddings().weight.shape[0])
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=left, output_attentions=True)
        got = engine(input_ids=ids, attention_mask=left, output_attentions=True)
    assert len(got.attentions) == len(expected.attentions) > 0
    return max(float((a - b).abs().max()) for a, b in zip(expected.attentions, got.attentions, strict=True))


def by_policy(size: int, names: tuple[str, ...]) -> dict[str, Any]:
    """T5 with the linears that a user says end its branches."""
    import transformers

    index = next(i for i, variant in enumerate(VARIANTS) if label(variant) == "t5")
    policy = {transformers.models.t5.modeling_t5.T5Block: names}
    return sweep(index, size, {"injection_policy": policy}) | held(index, size, {"injection_policy": policy})


def few_heads(size: int, heads: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A model with so few heads that ranks do not all get one."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=1,
    )  # fmt: skip
    original = transformers.LlamaForCausalLM(config).eval()
    ranks = {"tp_group": group(size), "tp_grain_size": 8}
    engine = split(copy.deepcopy(original), size, tensor_parallel=ranks, **settings)
    ids, left, _ = batch(96)
    with torch.no_grad():
        error = (
            original(input_ids=ids, attention_mask=left).logits
            - engine(input_ids=ids, attention_mask=left).logits
        )
    down = engine.module.model.layers[0].mlp.down_proj.weight
    return {
        "error": float(error.abs()[left.bool()].max()),
        "rows": dict.fromkeys(r.how for r in engine.report().split),
        "down": down.shape[1],
    }


class Stranger(nn.Module):
    """A model that nothing is known of: no config, no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(40, 90), nn.ReLU(), nn.Linear(90, 40)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(0.7))  # of no dims

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.scale * layer(x)
        return x


class Residual(nn.Module):
    """A layer of nobody's."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(40, 90), nn.Linear(90, 40)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.up(x).relu())
        return out


def stranger(size: int, sequential: bool = False) -> dict[str, Any]:
    """A model that cannot be run to see what flows where, of a list of layers or of an `nn.Sequential`."""
    torch.manual_seed(0)
    original = (nn.Sequential(Residual(), Residual()) if sequential else Stranger()).eval()
    engine = split(copy.deepcopy(original), size)
    x = torch.randn(5, 40)
    with torch.no_grad():
        error = float((original(x) - engine(x)).abs().max())
    return {
        "error": error,
        "rows": dict.fromkeys((r.how, r.source) for r in engine.report().split),
        "text": str(engine.report()),
    }


def written() -> None:
    """What is refused of an engine whose layers run their own code on several ranks."""
    model = peaked_model(VARIANTS[LLAMA][1])
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    split(model, 2).load_state_dict(state)


def narrow_experts(size: int, units: int) -> dict[str, Any]:
    """Experts whose units are too few, or too odd, for grouped products on each rank."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=units, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return _beside(transformers.MixtralForCausalLM(config).eval(), size)


def other_arguments(size: int) -> dict[str, Any]:
    """A model that hands values to some of its layers, which are otherwise alike."""
    from tests.architectures.tiny import tiny_model

    return _beside(tiny_model("neomme", "masked").eval(), size)


def _beside(original: Any, size: int) -> dict[str, Any]:
    engine = split(copy.deepcopy(original), size)
    ids, _, right = batch(60)
    with torch.no_grad():
        expected = original(input_ids=ids, attention_mask=right).logits
        error = expected - engine(input_ids=ids, attention_mask=right).logits
    rows = {row.name: row.how for row in engine.report().split}
    return {"error": float(error.abs()[right.bool()].max()), "rows": rows}


def captured(index: int, size: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Captured decode steps and forwards on several ranks, beside the model."""
    captures: list[Any] = []

    class Counting(NullDevice):
        def capture(self, run: Any, static: Any = None) -> Any:
            captures.append(run)
            return super().capture(run, static)

    _, tiny = VARIANTS[index]
    original = peaked_model(tiny)
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr("slipstream.engine.build.choose", Counting)
        engine = split(copy.deepcopy(original), size, enable_cuda_graph=True, **settings)
        same, errors = [], []
        for seed in range(2):
            ids = torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(seed))
            same.append(torch.equal(original.generate(ids, **options), engine.generate(ids, **options)))
            expected = original(ids, use_cache=False).logits
            errors.append(float((engine(ids, use_cache=False).logits - expected).abs().max()))
    return {"same": same, "error": max(errors), "captures": len(captures), "text": str(engine.report())}


def ended_by_one(size: int, settings: dict[str, Any], options: dict[str, Any]) -> tuple[int, int]:
    """Lengths where only the last rank's criterion ends a generation, and where only its time is over."""
    from transformers.generation.stopping_criteria import MaxTimeCriteria

    engine: Any = split(peaked_model(VARIANTS[LLAMA][1]), size, **settings)
    last = dist.get_rank() == size - 1

    def over(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(ids),), last and ids.shape[1] >= 6)

    given: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, **options}
    ids = torch.tensor([[5, 6, 7]])
    by_tokens = engine.generate(ids, stopping_criteria=[over], **given)
    by_time = engine.generate(ids, stopping_criteria=[MaxTimeCriteria(0.0 if last else 1e6)], **given)
    return by_tokens.shape[1], by_time.shape[1]


def copied(size: int) -> bool:
    """Whether a copy of an engine chooses the same tokens once the engine is gone."""
    engine: Any = split(peaked_model(VARIANTS[LLAMA][1]), size, replace_with_kernel_inject=True)
    ids, options = torch.tensor([[5, 6, 7]]), {"max_new_tokens": 4, "do_sample": False}
    due, twin = engine.generate(ids, **options), copy.deepcopy(engine)
    engine.destroy()
    return torch.equal(twin.generate(ids, **options), due)
