"""`engine(...)` is the model's own forward: every argument, every output, every cache."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from slipstream.families import FAMILIES
from slipstream.model.block.block import Block
from tests.families.sweep import peaked_model
from tests.helpers.models import (
    VOCABULARY,
    Pair,
    blocks_that_run,
    close,
    inject,
    left_padded,
    make,
    pair,
    prompt,
)

KINDS = ["llama", "gpt2", "mistral", "gemma2", "mixtral", "bloom", "gptj", "bert"]
CAUSAL = [kind for kind in KINDS if kind != "bert"]


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {}


def of(kind: str, pairs: dict[str, Pair]) -> Pair:
    if kind not in pairs:
        pairs[kind] = pair(kind)
    return pairs[kind]


@pytest.fixture(params=KINDS)
def models(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return of(request.param, pairs)


@pytest.fixture(params=CAUSAL)
def causal(request: pytest.FixtureRequest, pairs: dict[str, Pair]) -> Pair:
    return of(request.param, pairs)


@pytest.fixture
def llama(pairs: dict[str, Pair]) -> Pair:
    return of("llama", pairs)


@pytest.fixture
def blocks() -> Iterator[list[Block]]:
    """The blocks that ran, in order."""
    with blocks_that_run() as ran:
        yield ran.blocks


def both(
    models: Pair, *args: Any, mask: Tensor | None = None, atol: float = 1e-4, **kwargs: Any
) -> tuple[Any, Any]:
    with torch.no_grad():
        expected = models.original(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    got = models.engine(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    close(expected, got, mask=mask, atol=atol)
    return expected, got


def padded(side: str) -> tuple[Tensor, Tensor]:
    ids, mask = left_padded()
    return (ids, mask) if side == "left" else (ids.flip(1), mask.flip(1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_logits_of_a_padded_batch_are_the_originals(models: Pair, side: str, blocks: list[Block]) -> None:
    ids, mask = padded(side)
    close(
        models.original(input_ids=ids, attention_mask=mask).logits.detach(),
        models.engine(input_ids=ids, attention_mask=mask).logits,
        mask=mask,
    )
    assert len(blocks) == 2, "the fused blocks did not run"


MASKS: dict[str, list[list[int]]] = {
    "right": [[1, 1, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 9],
    "both sides": [[0, 0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 1, 1, 1, 1]],
    "a hole": [[1, 1, 0, 0, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1, 1], [1] * 9],
    "a hole and the end": [[1, 1, 0, 1, 1, 1, 1, 0, 0], [1] * 9, [1] * 9],
}


@pytest.mark.parametrize("side", MASKS)
def test_without_a_cache_what_sees_a_real_token_is_computed_padding_or_not(causal: Pair, side: str) -> None:
    """The last place among it, which `generate` reads, and the end of a text, which CLIP does."""
    ids, mask = prompt(), torch.tensor(MASKS[side])
    given = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    with torch.no_grad():
        expected, got = causal.original(**given).logits, causal.engine(**given).logits
    sees = mask.cumsum(1) > 0
    close(expected[sees], got[sees])
    given |= {"max_new_tokens": 4, "do_sample": False}
    assert causal.engine.generate(**given).tolist() == causal.original.generate(**given).tolist()


def test_a_text_s_end_that_the_mask_hides_is_read_all_the_same() -> None:
    """CLIP's token of padding is the one that ends a text, whose state stands for it."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "projection_dim": 16}
    config = transformers.CLIPTextConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=4, eos_token_id=1, pad_token_id=1, bos_token_id=0
    )
    torch.manual_seed(0)
    original = transformers.CLIPTextModelWithProjection(config).eval()
    engine = inject(original)
    assert engine.report().level == "block"
    ids = prompt()
    ids[0, 5:], ids[1, 7:], ids[2, 8:] = 1, 1, 1
    for mask in (ids != 1, (ids != 1).roll(1, dims=1) | (ids != 1)):
        given = {"input_ids": ids, "attention_mask": mask.long()}
        with torch.no_grad():
            close(original(**given).text_embeds, engine(**given).text_embeds)


@pytest.mark.parametrize("length", [1, 2, 11])
def test_a_single_row_gives_the_originals_outputs(models: Pair, length: int) -> None:
    both(models, input_ids=prompt(1, length))


def test_positional_arguments_work(models: Pair) -> None:
    both(models, prompt())


def test_hidden_states_are_recorded(models: Pair, blocks: list[Block]) -> None:
    expected, got = both(models, input_ids=prompt(), output_hidden_states=True)
    assert len(got.hidden_states) == len(expected.hidden_states) == 3
    assert len(blocks) == 2


def eager(kind: str) -> Pair:
    original = make(kind)
    original.set_attn_implementation("eager")
    return Pair(original, inject(original))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert", "bloom", "gptj", "mixtral", "distilbert"])
def test_attention_maps_are_the_originals_with_eager_attention(kind: str) -> None:
    models = eager(kind)
    ids, mask = left_padded()
    close(
        models.original(input_ids=ids, attention_mask=mask).logits.detach(),
        models.engine(input_ids=ids, attention_mask=mask).logits,
        mask=mask,
    )
    expected, got = both(models, input_ids=prompt(), output_attentions=True)
    assert len(got.attentions) == 2 and got.attentions[0].dim() == 4
    for model in (models.original, models.engine.module):
        model.config.output_attentions = True
    _, got = both(models, input_ids=prompt())
    assert len(got.attentions) == 2 and got.attentions[0] is not None
    both(models, input_ids=prompt(), output_attentions=False)


def test_positional_output_attentions_count() -> None:
    models = eager("gptj")
    names = list(inspect.signature(models.original.forward).parameters)
    if "output_attentions" not in names:
        pytest.skip("this version's forward takes it by name only")
    args: list[Any] = [None] * (names.index("output_attentions") + 1)
    args[0], args[-1] = prompt(), True
    _, got = both(models, *args)
    assert got.attentions[0] is not None


def test_attention_maps_with_sdpa_are_whatever_the_original_gives(llama: Pair) -> None:
    both(llama, input_ids=prompt(), output_attentions=True)


def test_router_logits_are_the_originals(pairs: dict[str, Pair]) -> None:
    models = of("mixtral", pairs)
    expected, got = both(models, input_ids=prompt(), output_router_logits=True)
    assert len(got.router_logits) == 2


def caches(config: Any) -> dict[str, Any]:
    return {
        "dynamic": transformers.DynamicCache(config=config),
        "plain dynamic": transformers.DynamicCache(),
        "static": transformers.StaticCache(config=config, max_cache_len=24),
    }


@pytest.mark.parametrize("cache", ["dynamic", "plain dynamic", "static"])
@pytest.mark.parametrize("padding", [False, True])
def test_a_second_forward_continues_from_the_cache(causal: Pair, cache: str, padding: bool) -> None:
    if causal.original.config.model_type in ("mistral", "gemma2") and cache == "plain dynamic":
        pytest.skip("a sliding window asks for the cache of its config")
    if causal.original.config.model_type == "bloom" and cache == "static":
        pytest.skip("transformers' own BLOOM cannot use a static cache")
    ids, mask = left_padded() if padding else (prompt(), torch.ones(3, 9, dtype=torch.long))
    more = prompt(3, 2, seed=8)
    longer = torch.cat([mask, torch.ones(3, 2, dtype=torch.long)], dim=1)
    logits = []
    for model in (causal.original, causal.engine):
        past = caches(model.config)[cache]
        with torch.no_grad():
            first = model(input_ids=ids, attention_mask=mask, past_key_values=past, use_cache=True)
            assert first.past_key_values is past
            second = model(input_ids=more, attention_mask=longer, past_key_values=past, use_cache=True)
            one = torch.cat([longer, torch.ones(3, 1, dtype=torch.long)], dim=1)
            third = model(input_ids=more[:, :1], attention_mask=one, past_key_values=past, use_cache=True)
        logits.append((first.logits, second.logits, third.logits))
        assert int(past.get_seq_length()) == 12
    close(logits[0][0], logits[1][0], mask=mask)
    close(logits[0][1:], logits[1][1:])


def test_the_returned_cache_holds_the_originals_keys_and_values(causal: Pair) -> None:
    both(causal, input_ids=prompt(), use_cache=True)


def test_a_quantized_cache_works(llama: Pair) -> None:
    pytest.importorskip("optimum.quanto", reason="QuantizedCache needs a backend that is not installed")
    outputs = []
    for model in (llama.original, llama.engine):
        past = transformers.QuantizedCache("quanto", model.config, nbits=4)
        outputs.append(model(input_ids=prompt(), past_key_values=past).logits.detach())
    close(*outputs)


def test_a_cache_of_the_users_own_class_works(llama: Pair) -> None:
    class Counting(transformers.DynamicCache):
        updates = 0

        def update(self, *args: Any, **kwargs: Any) -> Any:
            self.updates += 1
            return super().update(*args, **kwargs)

    past = Counting()
    llama.engine(input_ids=prompt(), past_key_values=past)
    assert past.updates == 2 and past.get_seq_length() == 9


def test_no_cache_is_made_where_none_is_wanted(causal: Pair) -> None:
    _, got = both(causal, input_ids=prompt(), use_cache=False)
    assert got.past_key_values is None


def test_embeddings_can_take_the_place_of_ids(models: Pair) -> None:
    embeds = models.original.get_input_embeddings()(prompt()).detach()
    both(models, inputs_embeds=embeds)


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_a_mask_of_four_dimensions_is_honoured(pairs: dict[str, Pair], kind: str, form: str) -> None:
    models = of(kind, pairs)
    ids, length = prompt(2, 6), 6
    generator = torch.Generator().manual_seed(3)
    visible = torch.rand(2, 1, length, length, generator=generator) > 0.4
    visible = (visible | torch.eye(length, dtype=torch.bool)).tril()
    mask = (
        visible
        if form == "bool"
        else torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    )
    _, got = both(models, input_ids=ids, attention_mask=mask)
    plain = models.engine(input_ids=ids)
    assert not torch.allclose(got.logits, plain.logits, atol=1e-2), "the mask did not matter"


@pytest.mark.parametrize("kind", ["gptj", "gemma2"])
def test_a_boolean_mask_that_eager_attention_adds_is_added(kind: str) -> None:
    """Adding ones is hardly what the caller meant, and it is what the original does."""
    original = make(kind)
    original.set_attn_implementation("eager")
    visible = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    both(Pair(original, inject(original)), input_ids=prompt(1, 6), attention_mask=visible)


@pytest.mark.parametrize("family", ["codegen", "gptj", "llama", "gpt2"])
def test_biases_in_a_mask_weigh_as_in_the_original(family: str) -> None:
    """CodeGen adds them before it scales the scores."""
    original = peaked_model(FAMILIES[family].tiny[0])
    far = torch.arange(6)[None] - torch.arange(6)[:, None]
    biases = (0.3 * far).masked_fill(far > 0, torch.finfo(torch.float32).min)[None, None]
    _, got = both(Pair(original, inject(original)), input_ids=prompt(1, 6), attention_mask=biases)
    plain = original(input_ids=prompt(1, 6)).logits.detach()
    assert not torch.allclose(got.logits, plain, atol=1e-2), "the biases did not matter"


@pytest.mark.parametrize("filled", [0, 3])
def test_a_mask_may_be_as_long_as_a_static_cache(llama: Pair, filled: int) -> None:
    ids, outputs = prompt(2, 7), []
    for model in (llama.original, llama.engine):
        cache = transformers.StaticCache(config=llama.original.config, max_cache_len=12)
        mask = torch.ones(2, 12, dtype=torch.long)
        mask[0, :2] = 0
        if filled:
            model(input_ids=ids[:, :filled], attention_mask=mask, past_key_values=cache)
        outputs.append(model(input_ids=ids[:, filled:], attention_mask=mask, past_key_values=cache).logits)
    close(outputs[0].detach(), outputs[1], mask=mask[:, filled:7])


def test_a_mask_may_be_as_long_as_a_static_cache_of_windows() -> None:
    models = pair("mistral", sliding_window=6)
    caches = [transformers.StaticCache(config=models.original.config, max_cache_len=14) for _ in range(2)]
    for at, size in ((0, 3), (3, 1), (4, 1), (5, 4), (9, 1)):
        given = {"input_ids": prompt(2, 12)[:, at : at + size], "attention_mask": torch.ones(2, 14).long()}
        expected, got = (
            model(**given, past_key_values=cache).logits.detach()
            for model, cache in zip((models.original, models.engine), caches, strict=True)
        )
        close(expected, got)


def test_windows_over_a_static_cache_are_the_originals() -> None:
    """GPT-Neo counts its windows from the end of the cache, though most of that may be empty."""
    original = make("gpt_neo")
    models = Pair(original, inject(original))
    assert models.engine.report().level == "block"
    ids, mask = left_padded()
    caches = [transformers.StaticCache(config=original.config, max_cache_len=20) for _ in range(2)]
    outputs = [
        model(input_ids=ids, attention_mask=mask, past_key_values=cache).logits
        for model, cache in zip((models.original, models.engine), caches, strict=True)
    ]
    close(outputs[0].detach(), outputs[1], mask=mask)


def test_a_4d_mask_packs_sequences_with_positions(llama: Pair) -> None:
    """Two sequences in one row, told apart by the mask and by positions that start again."""
    ids = prompt(1, 8)
    visible = torch.block_diag(torch.ones(3, 3), torch.ones(5, 5)).bool().tril()[None, None]
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
    _, got = both(llama, input_ids=ids, attention_mask=visible, position_ids=positions)
    alone = llama.engine(input_ids=ids[:, 3:])
    close(alone.logits, got.logits[:, 3:])


@pytest.mark.parametrize("keep", [1, 3, torch.tensor([0, 4])])
def test_logits_to_keep(llama: Pair, keep: int | Tensor) -> None:
    both(llama, input_ids=prompt(), logits_to_keep=keep)


def test_position_ids_are_honoured(llama: Pair) -> None:
    # In reverse, because a rotary embedding sees nothing but differences.
    both(llama, input_ids=prompt(), position_ids=torch.arange(9).flip(0)[None])


@pytest.mark.parametrize("use_cache", [True, False])
def test_one_position_for_all_tokens_is_honoured(causal: Pair, use_cache: bool) -> None:
    both(causal, input_ids=prompt(), position_ids=torch.tensor([[3]]), use_cache=use_cache)


def test_negative_positions_are_not_counted_from_the_end(pairs: dict[str, Pair]) -> None:
    for model in (of("gptj", pairs).original, of("gptj", pairs).engine):
        with pytest.raises((RuntimeError, IndexError), match="out of"):
            model(input_ids=prompt(), position_ids=torch.arange(9)[None] - 3)


def test_labels_give_the_loss(models: Pair) -> None:
    expected, got = both(models, input_ids=prompt(), labels=prompt())
    assert got.loss.dim() == 0 and not got.loss.requires_grad


def test_return_dict_false_gives_tuples(models: Pair) -> None:
    _, got = both(models, input_ids=prompt(), return_dict=False)
    assert isinstance(got, tuple)


def test_return_tuple_false_gives_the_plain_tensor() -> None:
    for kind in ("llama", "bert"):
        original = make(kind)
        engine = inject(original, return_tuple=False)
        close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()))
        close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt(), labels=prompt()))


def test_no_autograd_graph_is_built(models: Pair) -> None:
    for parameter in models.engine.module.parameters():
        parameter.requires_grad_(True)
    with torch.enable_grad():
        output = models.engine(input_ids=prompt(), output_hidden_states=True)
    assert not output.logits.requires_grad and output.logits.grad_fn is None
    assert all(state.grad_fn is None for state in output.hidden_states)


def test_inputs_are_left_as_they_were(llama: Pair) -> None:
    ids, mask = left_padded()
    before = ids.clone(), mask.clone()
    llama.engine(input_ids=ids, attention_mask=mask)
    assert torch.equal(ids, before[0]) and torch.equal(mask, before[1])


def test_a_model_in_training_mode_is_switched_to_eval() -> None:
    original = make("llama", attention_dropout=0.5)
    trained = copy.deepcopy(original).train()
    engine = inject(trained)
    assert not any(module.training for module in engine.modules())
    assert any("training" in note for note in engine.report().notes)
    close(original(input_ids=prompt()).logits.detach(), engine(input_ids=prompt()).logits)


def test_inference_mode_works(llama: Pair) -> None:
    with torch.inference_mode():
        got = llama.engine(input_ids=prompt()).logits
    close(llama.original(input_ids=prompt()).logits.detach(), got.clone())


@pytest.mark.parametrize(
    ("kind", "head"),
    [
        ("llama", "LlamaModel"),
        ("llama", "LlamaForSequenceClassification"),
        ("gpt2", "GPT2ForSequenceClassification"),
        ("bert", "BertModel"),
        ("bert", "BertForTokenClassification"),
        ("bert", "BertForQuestionAnswering"),
        ("bert", "BertLMHeadModel"),
    ],
)
def test_every_head_works(kind: str, head: str) -> None:
    options = {"is_decoder": True} if head == "BertLMHeadModel" else {}
    models = pair(kind, head, **options)
    ids, mask = padded("right")
    with torch.no_grad():
        expected = (
            models.original(input_ids=ids, attention_mask=mask, use_cache=False)
            if kind != "bert"
            else (models.original(input_ids=ids, attention_mask=mask))
        )
    got = models.engine(
        input_ids=ids, attention_mask=mask, **({} if kind == "bert" else {"use_cache": False})
    )
    close(expected, got, mask=mask)


def test_a_model_that_no_family_knows_passes_through() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()
    engine = inject(original)
    x = torch.randn(3, 8)
    assert engine.report().level == "none"
    torch.testing.assert_close(engine(x), original(x).detach())
    assert engine(x).grad_fn is None


def test_token_type_ids_reach_bert(pairs: dict[str, Pair]) -> None:
    models = of("bert", pairs)
    both(models, input_ids=prompt(), token_type_ids=(prompt() % 2))


def test_a_layer_can_be_called_by_itself(llama: Pair) -> None:
    """As an adapter, a probe or a hook would."""
    hidden = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    outputs = []
    for model in (llama.original, llama.engine.module):
        rope = model.model.rotary_emb(hidden, torch.arange(5)[None])
        with torch.no_grad():
            outputs.append(model.model.layers[0](hidden, position_embeddings=rope))
    close(*outputs)


def test_a_forward_hook_on_a_layer_fires(llama: Pair) -> None:
    seen = []
    handle = llama.engine.module.model.layers[1].register_forward_hook(
        lambda *args: seen.append(args[2].shape)
    )
    llama.engine(input_ids=prompt())
    handle.remove()
    assert seen == [(3, 9, 32)]


def test_a_mask_beside_a_cache_that_counts_no_tokens_is_the_models_to_judge() -> None:
    """Mamba 2 takes its states by another name, and drops what comes by this one."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}
    config = transformers.Mamba2Config(vocab_size=128, num_hidden_layers=2, chunk_size=8, **sizes)
    original = transformers.Mamba2ForCausalLM(config).eval()
    answers = []
    with torch.no_grad():
        for model in (original, inject(original)):
            ids, mask = left_padded()
            before = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1], use_cache=True)
            given = {"attention_mask": mask, "past_key_values": before.cache_params}
            answers.append(model(input_ids=ids[:, -1:], **given).logits)
    close(*answers)
