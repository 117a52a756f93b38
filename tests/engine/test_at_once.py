"""Encoders of text that answer without their own loop say what that says, and give way where it is needed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from slipstream.errors import RequestError
from slipstream.kernels.cpu.library import refuse
from slipstream.model.block.layer_call import LayerSignature
from slipstream.model.frame.text_encoder import answers_at_once
from tests.helpers.models import VOCABULARY, Pair, close, inject, make, pair, prompt

pytestmark = pytest.mark.skipif(refuse("avx2") is not None, reason=str(refuse("avx2")))

_SHAPE = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "type_vocab_size": 3,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", {**_SHAPE, "pad_token_id": 0}),
    "roberta": ("Roberta", _SHAPE),
    "xlm-roberta": ("XLMRoberta", _SHAPE),
    "camembert": ("Camembert", _SHAPE),
    "data2vec-text": ("Data2VecText", _SHAPE),
    "electra": ("Electra", {**_SHAPE, "pad_token_id": 0, "embedding_size": 24}),
    "electra, one width": ("Electra", {**_SHAPE, "pad_token_id": 0, "embedding_size": 32}),
    "distilbert": (
        "DistilBert",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 2,
            "n_heads": 4,
            "max_position_embeddings": 40,
        },
    ),
}
MASKS = {
    "none": [1] * 9,
    "right": [1] * 6 + [0] * 3,
    "left": [0] * 4 + [1] * 5,
    "holes": [1, 0, 1, 1, 0, 0, 1, 0, 1],
}


def of(kind: str, head: str = "Model", **options: Any) -> Pair:
    """A random model of a kind, and its engine."""
    name, shape = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**shape, **options})
    original = getattr(transformers, f"{name}{head}")(config).eval()
    with torch.no_grad():
        for parameter in original.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return Pair(original, inject(original))


def padded(*names: str, padding: int = 0) -> dict[str, Tensor]:
    mask = torch.tensor([MASKS[name] for name in names])
    return {"input_ids": prompt(len(names), 9).where(mask.bool(), padding), "attention_mask": mask}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A name for each layer whose arguments were read, which none is by an answer at once."""
    seen: list[str] = []
    own = LayerSignature.read

    def counted(self: LayerSignature, args: Any, kwargs: Any, spec: Any) -> Any:
        seen.append(self.hidden)
        return own(self, args, kwargs, spec)

    monkeypatch.setattr(LayerSignature, "read", counted)
    return seen


def same(models: Pair, *args: Any, **inputs: Any) -> Any:
    """The engine's answer, after it was compared with the original's: real positions, and every field."""
    with torch.no_grad():
        expected = models.original(*args, **inputs)
    got = models.engine(*args, **inputs)
    assert type(got) is type(expected)
    if isinstance(expected, dict):
        assert list(got) == list(expected)
    close(expected, got, mask=inputs.get("attention_mask"))
    return got


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_says_what_the_original_says(kind: str, read: list[str]) -> None:
    models = of(kind)
    assert answers_at_once(models.engine.module)
    read.clear()
    padding = models.original.config.pad_token_id
    types = {"token_type_ids": torch.randint(0, 3, (3, 9))} if kind != "distilbert" else {}
    for inputs in (
        {"input_ids": prompt(2, 9)},
        {"input_ids": prompt(2, 9).where(torch.arange(9) < 7, padding)},  # padding that no mask hides
        {"input_ids": prompt(3, 9).int(), **types},
        padded("none", "none", padding=padding),
        {**padded("none", "right", "left", padding=padding), **types},
        {**padded("holes", "none"), "return_dict": True, "output_attentions": False},
    ):
        same(models, **inputs)
    same(models, prompt(1, 1))
    assert read == []


def test_masks_of_any_whole_numbers_are_read(read: list[str]) -> None:
    models = of("bert")
    read.clear()
    inputs = padded("right", "holes")
    for mask in (inputs["attention_mask"].bool(), inputs["attention_mask"].int() * 3):
        same(models, **{**inputs, "attention_mask": mask})
    assert read == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(dtype: torch.dtype, read: list[str]) -> None:
    original = make("bert", "BertModel", gain=1.0).to(dtype)
    engine = inject(original, dtype=dtype)
    read.clear()
    inputs = padded("none", "right", "left")
    with torch.no_grad():
        expected = original(**inputs)
    got = engine(**inputs)
    assert read == [] and got.pooler_output.dtype == dtype
    for name in expected:
        exact, ours = expected[name].float(), got[name].float()
        if exact.dim() == 3:
            exact, ours = (t[inputs["attention_mask"].bool()] for t in (exact, ours))
        torch.testing.assert_close(ours, exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("rounds", [False, True], ids=["weights", "inputs too"])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_packed_weights(name: str, rounds: bool, read: list[str]) -> None:
    original = make("bert", "BertModel", gain=1.0).to(torch.bfloat16)
    quant = {"weight": {"format": name}, "activation": {"enabled": rounds}}
    engine = inject(original, dtype=torch.bfloat16, quant=quant)
    assert answers_at_once(engine.module)
    read.clear()
    inputs = padded("none", "right", "left")
    got = engine(**inputs)
    assert read == []
    with engine.module.embeddings.register_forward_hook(lambda *_: None):
        expected = engine(**inputs)  # layer by layer
    assert read
    for name in expected:
        torch.testing.assert_close(got[name].float(), expected[name].float(), rtol=0.05, atol=0.05)


def test_without_a_pooler(read: list[str]) -> None:
    original = transformers.BertModel(transformers.BertConfig(**KINDS["bert"][1]), add_pooling_layer=False)
    models = Pair(original.eval(), inject(original.eval()))
    read.clear()
    assert list(same(models, **padded("none", "right"))) == ["last_hidden_state"]
    assert read == []


@pytest.mark.parametrize("head", ["ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"])
def test_within_a_model_with_a_head(head: str, read: list[str]) -> None:
    models = of("roberta", head)
    assert answers_at_once(models.engine.module.roberta)
    read.clear()
    same(models, **padded("none", "right", padding=1))
    assert read == []


def test_a_loss_over_padded_positions_is_the_originals() -> None:
    models = of("bert", "ForMaskedLM")
    inputs = padded("none", "right")
    with torch.no_grad():
        expected = models.original(**inputs, labels=inputs["input_ids"])
    got = models.engine(**inputs, labels=inputs["input_ids"])
    close(expected.loss, got.loss)
    close(expected.logits, got.logits)


@pytest.mark.parametrize(
    "more",
    [
        {"output_hidden_states": True},
        {"return_dict": False},
        {"position_ids": torch.arange(9).flip(0)[None]},
        {"attention_mask": torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()},
        {"attention_mask": torch.tensor([[1] * 9, [0] * 9])},
        {"input_ids": None, "inputs_embeds": torch.linspace(-1, 1, 2 * 9 * 32).view(2, 9, 32)},
    ],
    ids=lambda more: ", ".join(more),
)
def test_the_models_own_code_runs_for_whatever_else_is_said(more: dict[str, Any], read: list[str]) -> None:
    models = of("bert")
    read.clear()
    inputs = {"input_ids": prompt(2, 9), **more}
    with torch.no_grad():
        expected = models.original(**inputs)
    close(expected, models.engine(**inputs))
    assert read


@pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
def test_a_config_that_asks_for_more_is_heard_later_on(name: str) -> None:
    models = pair("bert", "BertModel", attn_implementation="eager")
    for model in (models.original, models.engine.module):
        setattr(model.config, name, True)
    assert len(list(same(models, **padded("none", "right")))) > 2


def louder(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 1.5 if isinstance(output, Tensor) else None


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a hook on the embeddings": lambda m: m.embeddings.register_forward_hook(louder),
    "a hook on a table": lambda m: m.embeddings.word_embeddings.register_forward_hook(louder),
    "a hook on a layer's part": lambda m: m.encoder.layer[1].output.dense.register_forward_hook(louder),
    "a hook on the pooler": lambda m: m.pooler.activation.register_forward_hook(louder),
    "a hook on the model": lambda m: m.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"].flip(1)}),
        with_kwargs=True,
    ),
    "another part": lambda m: setattr(m.pooler, "activation", nn.Sigmoid()),
    "fewer layers": lambda m: m.encoder.layer.__delitem__(1),
    "layers in another order": lambda m: setattr(m.encoder, "layer", m.encoder.layer[::-1]),
    "another forward": lambda m: setattr(
        m.embeddings, "forward", lambda *a, f=m.embeddings.forward, **k: -f(*a, **k)
    ),
    "a weight in place": lambda m: m.embeddings.LayerNorm.weight.data.mul_(0.5),
    "a layer's weight in place": lambda m: m.encoder.layer[0].intermediate.dense.weight.data.mul_(0.5),
    "another table": lambda m: setattr(
        m.embeddings.word_embeddings, "weight", nn.Parameter(m.embeddings.word_embeddings.weight * 2)
    ),
    "a layer's other weight": lambda m: setattr(
        m.encoder.layer[0].output.dense, "weight", nn.Parameter(m.encoder.layer[0].output.dense.weight * 2)
    ),
    "training": lambda m: m.embeddings.dropout.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_done_to_the_model_afterwards_counts(change: str) -> None:
    options = {"hidden_dropout_prob": 0.0}  # or two trainings would differ
    models = pair("bert", "BertModel", **options)
    inputs = padded("none", "right")
    before = same(models, **inputs).pooler_output.clone()
    with torch.no_grad():
        for model in (models.original, models.engine.module):
            CHANGES[change](model)
    after = same(models, **inputs).pooler_output
    # Its own code rounds otherwise, by 1e-6 and more where processors sum in wider registers; what the other
    # changes do is of the size of the values.
    assert torch.allclose(before, after, atol=1e-5) is (change == "training")


def test_a_copy_answers_by_its_own_tensors(read: list[str]) -> None:
    models = of("bert")
    twin = copy.deepcopy(models.engine)
    with torch.no_grad():
        for parameter in models.engine.module.embeddings.parameters():
            parameter.zero_()
    read.clear()
    same(Pair(models.original, twin), **padded("none", "right"))
    assert read == []
    twin.module.embeddings.LayerNorm.register_forward_hook(louder)
    models.original.embeddings.LayerNorm.register_forward_hook(louder)
    same(Pair(models.original, twin), **padded("none", "right"))


def test_embeddings_that_are_not_what_the_family_says_keep_their_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embeddings = transformers.models.bert.modeling_bert.BertEmbeddings
    own = embeddings.forward
    monkeypatch.setattr(embeddings, "forward", lambda self, *args, **kwargs: own(self, *args, **kwargs) * 1.1)
    models = of("bert")
    assert not answers_at_once(models.engine.module)
    same(models, **padded("none", "right"))


@pytest.mark.parametrize("token", [-1, VOCABULARY])
def test_ids_outside_of_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(RequestError, match=r"input_ids hold"):
        of("bert").engine(input_ids=torch.tensor([[5, token]]))


def test_more_tokens_than_places_are_the_originals_error() -> None:
    models = of("bert")
    with torch.no_grad(), pytest.raises((RuntimeError, IndexError)):
        models.original(input_ids=prompt(1, 41))
    with pytest.raises((RuntimeError, IndexError)):
        models.engine(input_ids=prompt(1, 41))
