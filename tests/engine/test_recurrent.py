"""Models whose layers keep a state per sequence, or share keys, generate on the engine road as originally."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import slipstream
from slipstream.engine.generation.batch import Batch
from slipstream.families import Family, Tiny
from slipstream.kernels.cpu import library as native
from slipstream.kernels.cpu.library import load
from slipstream.model.block.paged_cache import BLOCK_SIZE, PagedCache
from slipstream.spec import Norm, Place, Recurrence
from tests.engine.test_beams import CASES, SPEC, prompts, written
from tests.families.sweep import VARIANTS, label, peaked_model
from tests.helpers.caches import same_cache
from tests.helpers.models import Pair, inject, left_padded, prompt, roads

pytestmark = pytest.mark.skipif(
    load("baseline") is None, reason=str(native.refuse("baseline") or "no native library")
)


def recurs(variant: tuple[Family, Tiny]) -> bool:
    family, tiny = variant
    if not family.mixers or family.frame is None:
        return False
    config = getattr(transformers, tiny.config)(**tiny.options)
    specs = [family.spec(config, index) for index in range(config.num_hidden_layers)]
    return any(spec.recurrence is not None for spec in specs)


LEFT = "falcon_h1 biases of gates, multipliers"
"""What the native library does not run, so that transformers' loop does."""
RECURRENT = [v for v in VARIANTS if recurs(v) and label(v) != LEFT]


def two_of(variant: tuple[Family, Tiny], **options: Any) -> Pair:
    tiny = dataclasses.replace(variant[1], options={**variant[1].options, **options})
    original: Any = peaked_model(tiny)
    return Pair(original, inject(original))


SHARING = [v for v in VARIANTS if v[0].name in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")]
UNTIED = {"tie_word_embeddings": False}
"""With tied embeddings these models repeat the last token, whatever their layers add."""


@pytest.fixture(scope="module", params=[*RECURRENT, *SHARING], ids=label)
def models(request: pytest.FixtureRequest) -> Pair:
    return two_of(request.param, **(UNTIED if request.param in SHARING else {}))


@pytest.fixture(scope="module", params=RECURRENT, ids=label)
def recurring(request: pytest.FixtureRequest) -> Pair:
    return two_of(request.param)


def named(name: str, **options: Any) -> Pair:
    return two_of(next(v for v in RECURRENT if label(v) == name), **options)


def both(models: Pair, road: str = "engine", seed: int = 3, **kwargs: Any) -> tuple[Any, Any]:
    kwargs = {"max_new_tokens": 12, "pad_token_id": 0, **kwargs}
    torch.manual_seed(seed)
    expected = models.original.generate(**copy.deepcopy(kwargs))
    torch.manual_seed(seed)
    with roads(models.engine) as counts:
        got = models.engine.generate(**copy.deepcopy(kwargs))
    assert counts.taken == road
    assert torch.equal(*(getattr(one, "sequences", one) for one in (expected, got)))
    return expected, got


def test_every_kind_of_recurrence_is_here() -> None:
    rules = {
        spec.recurrence.rule
        for models in (named("lfm2 convolutions"), named("qwen3_next mixed"), named("bamba state spaces"))
        for spec in (block.spec for block in models.engine._built.runner.blocks)
        if spec.recurrence is not None
    }
    assert rules == {"none", "delta", "space"}


def test_greedy_search_of_a_padded_batch(models: Pair) -> None:
    ids, mask = left_padded()
    both(models, input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("length", [1, 2, 31, 33])
def test_greedy_search_of_one_row(models: Pair, length: int) -> None:
    both(models, input_ids=prompt(1, length), max_new_tokens=5 if length > 2 else 40)


def test_rows_that_end_early_leave_the_states_of_others(models: Pair) -> None:
    ids, mask = left_padded(4)
    both(models, input_ids=ids, attention_mask=mask, eos_token_id=list(range(3, 100, 7)), max_new_tokens=20)


def test_sampling(models: Pair) -> None:
    ids, mask = left_padded()
    both(models, input_ids=ids, attention_mask=mask, do_sample=True, num_return_sequences=2)


@pytest.mark.parametrize("case", ["beams", "across pages", "early ends", "drawn"])
def test_beams(models: Pair, case: str) -> None:
    given = prompts(BLOCK_SIZE - 1)
    with roads(models.engine) as counts:
        found = written(models.engine, given, CASES[case])
    assert counts.taken == "engine"
    assert torch.equal(written(models.original, given, CASES[case]), found)


@pytest.mark.parametrize("beams", [1, 2])
def test_a_cache_that_is_returned_has_the_states_of_the_original_s(recurring: Pair, beams: int) -> None:
    """A mixer beside attention is the exception: nothing says how transformers keeps its state."""
    ids, mask = left_padded()
    beside = any(block.spec.beside for block in recurring.engine._built.runner.blocks)
    options = {"return_dict_in_generate": True, "eos_token_id": None, "num_beams": beams}
    road = "compatible" if beside else "engine"
    expected, got = both(recurring, road, input_ids=ids, attention_mask=mask, do_sample=False, **options)
    longer = torch.nn.functional.pad(mask, (0, got.sequences.shape[1] - mask.shape[1]), value=1)
    if beams == 1:
        same_cache(expected.past_key_values, got.past_key_values, longer)
    else:  # the original's has all beams of a prompt
        assert type(expected.past_key_values) is type(got.past_key_values)


def test_prompts_in_chunks(models: Pair) -> None:
    runner, rows = models.engine._built.runner, prompt(3, 40)
    with torch.no_grad():
        whole, chunks = (Batch(runner, rows, None, max_length=48, token_budget=budget) for budget in (512, 7))
        torch.testing.assert_close(chunks.logits(), whole.logits(), atol=1e-3, rtol=1e-3)


def test_int8_weights_and_int8_cache() -> None:
    original = named("qwen3_5_text mixed").original
    engine = inject(original, dtype=torch.bfloat16, quant="int8", kv_cache_dtype="int8")
    assert all(w.format == "int8" for w in engine._built.runner.blocks[0].part.projections)
    ids = prompt(2)
    with roads(engine) as counts:
        tokens = engine.generate(input_ids=ids, max_new_tokens=6, pad_token_id=0)
    assert counts.taken == "engine" and tokens.shape == (2, 15)


@pytest.mark.parametrize(
    ("name", "targets"),
    [("lfm2 convolutions", ["in_proj", "out_proj"]), ("qwen3_5_text mixed", ["in_proj_qkv"])],
)
def test_adapters_on_mixers(name: str, targets: list[str], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    models = named(name)
    config = peft.LoraConfig(target_modules=targets, r=4, init_lora_weights=False)
    adapted = peft.get_peft_model(copy.deepcopy(models.original), config).eval()
    adapted.save_pretrained(tmp_path)
    models.engine.load_adapter(tmp_path, "one")
    models.engine.set_adapter("one")
    both(Pair(adapted, models.engine), input_ids=prompt(2))
    models.engine.set_adapter(None)
    both(models, input_ids=prompt(2))


def test_each_layer_timed_alone_generates_the_same() -> None:
    models = named("nemotron_h")
    models.engine.profile_model_time()
    both(models, input_ids=prompt(2))
    assert len(models.engine.model_times()) == 12


def test_a_changed_mixer_ends_the_engine_road() -> None:
    models = named("lfm2 convolutions")
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        mixer = model.model.layers[0].conv
        mixer.forward = lambda hidden_states, **_: hidden_states * 0.5
    both(models, road="compatible", input_ids=prompt(1))


def test_bounded_steps_of_a_state_space() -> None:
    both(named("nemotron_h", time_step_min=0.4), input_ids=prompt(2), max_new_tokens=30)


def test_values_written_into_a_mixer_count() -> None:
    models = named("qwen3_next mixed")
    both(models, input_ids=prompt(1))
    for model in (models.original, models.engine.module):
        with torch.no_grad():
            model.model.layers[0].linear_attn.dt_bias.add_(1.0)
            model.model.layers[2].linear_attn.out_proj.weight.mul_(0.5)
    both(models, input_ids=prompt(1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("lfm2 convolutions", {"conv_bias": True}),
        ("qwen3_next mixed", {"hidden_act": "gelu"}),
        ("bamba state spaces", {"mamba_proj_bias": True}),
        ("bamba state spaces", {"time_step_limit": (0.1, 1.0)}),
        ("falcon_h1", {"mamba_proj_bias": True}),
        ("falcon_h1 multipliers", {"mlp_bias": True}),
        ("falcon_h1 multipliers", {"attention_in_multiplier": 0.0}),
    ],
    ids=str,
)
def test_mixers_beyond_the_recurrence_are_left_to_transformers_loop(
    name: str, options: dict[str, Any]
) -> None:
    models = named(name, **options)
    assert models.engine._built.runner is None
    assert "generate runs transformers' own loop" in str(models.engine.report())
    ids, mask = left_padded()
    both(models, road="compatible", input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("before_gate", [True, False])
def test_norms_of_a_mixer_beside_attention(before_gate: bool) -> None:
    options = {"mamba_rms_norm": True, "mamba_norm_before_gate": before_gate}
    ids, mask = left_padded()
    both(named("falcon_h1 multipliers", **options), input_ids=ids, attention_mask=mask)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_multipliers_are_the_model_s_own(dtype: torch.dtype) -> None:
    original = named("falcon_h1 multipliers").original.to(dtype)
    both(Pair(original.float(), inject(original)), input_ids=prompt(2))


def test_multipliers_that_differ_within_an_input_are_left_to_transformers_loop() -> None:
    original = copy.deepcopy(named("falcon_h1 multipliers").original)
    original.model.layers[1].mamba.mup_vector[..., 3] = 2.0
    models = Pair(original, inject(original))
    assert models.engine._built.runner is None
    both(models, road="compatible", input_ids=prompt(2))


def test_custom_code_of_a_mixer_is_found_by_the_check() -> None:
    models = named("lfm2 convolutions")
    original = copy.deepcopy(models.original)
    own = type(original.model.layers[0].conv)

    class Louder(own):  # type: ignore[misc,valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return 1.5 * super().forward(*args, **kwargs)

    for layer in original.model.layers:
        if hasattr(layer, "conv"):
            layer.conv.__class__ = Louder
    louder = Pair(original, inject(original))
    assert louder.engine._built.runner is None
    both(louder, road="compatible", input_ids=prompt(1))
    assert isinstance(models.original, transformers.Lfm2ForCausalLM)


def test_states_follow_rows() -> None:
    recurrence = Recurrence("none", 3, 8, Place(0), Place(16), Place(8))
    recurrent = dataclasses.replace(SPEC, mixer="a short convolution", recurrence=recurrence)
    cache = PagedCache([recurrent, SPEC], 3, dtype=torch.bfloat16, device=torch.device("cpu"), rows=4)
    states = cache.layers[0].states
    assert states is not None and states.shape == (4, 16) and states.dtype == torch.float32
    states.copy_(torch.arange(4)[:, None].expand(4, 16))
    cache.follow([1, 1, 0])
    assert states[:, 0].tolist() == [1, 1, 0, 3]
    assert SPEC.norm == Norm("rms", 1e-6)


def test_copies_of_an_engine_have_mixers_of_their_own() -> None:
    models = named("qwen3_5_text mixed")
    twin = copy.deepcopy(models.engine)
    with torch.no_grad():
        for layer in twin.module.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.out_proj.weight.zero_()
    both(models, input_ids=prompt(1))
    with roads(twin) as counts:
        silenced = twin.generate(input_ids=prompt(1), max_new_tokens=12, pad_token_id=0)
    assert counts.taken == "engine"
    assert not torch.equal(
        silenced, models.engine.generate(input_ids=prompt(1), max_new_tokens=12, pad_token_id=0)
    )
    assert isinstance(twin, slipstream.InferenceEngine)
