"""diffusers: small random pipelines and components answer as the original, and are replaced as a whole."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slipstream
from slipstream.model.diffusion.attention import _Attend, attends
from slipstream.model.diffusion.channels_last import image_transformers, keep_channels_last
from slipstream.model.diffusion.convolutions import multiply_windows, wide_convolutions
from slipstream.model.diffusion.feed_forwards import plan_feeds, swap_feeds
from slipstream.model.parts.parts import is_swapped
from slipstream.ops import OPS
from slipstream.ops.bind import Bound

diffusers = pytest.importorskip(
    "diffusers", reason="diffusers is not installed: pip install slipstream[diffusion]"
)
FUSED: dict[str, Any] = {"dtype": torch.float32, "replace_with_kernel_inject": True}
HAS_KERNEL = "CPU kernels are not built here, and diffusers' attention stays torch's"


def unet(**options: Any) -> Any:
    torch.manual_seed(0)
    shape = {
        "sample_size": 8,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "cross_attention_dim": 32,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    return diffusers.UNet2DConditionModel(**{**shape, **options}).eval()


def vae() -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=16,
    ).eval()


def text_encoder() -> Any:
    import transformers

    torch.manual_seed(2)
    config = transformers.CLIPTextConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=16, bos_token_id=97, eos_token_id=98, pad_token_id=1,
    )  # fmt: skip
    return transformers.CLIPTextModel(config).eval()


def pipeline(**parts: Any) -> Any:
    """A Stable Diffusion pipeline; no tokenizer can be had, so prompts are embedded by its text encoder."""
    own = {"vae": vae(), "text_encoder": text_encoder(), "unet": unet(), **parts}
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    made = diffusers.StableDiffusionPipeline(
        **own, tokenizer=None, scheduler=scheduler, safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )  # fmt: skip
    made.set_progress_bar_config(disable=True)
    return made


def image(pipe: Any, steps: int = 3) -> Tensor:
    """What a seeded run of a whole pipeline makes."""
    ids = torch.tensor([[97, 5, 17, 30, 98]])
    with torch.no_grad():
        prompt, none = (pipe.text_encoder(input_ids=i).last_hidden_state for i in (ids, ids.flip(1)))
    made = pipe(
        prompt_embeds=prompt, negative_prompt_embeds=none, num_inference_steps=steps, guidance_scale=5.0,
        generator=torch.Generator().manual_seed(3), output_type="pt",
    )  # fmt: skip
    images: Tensor = made.images
    return images


def test_a_pipeline_makes_the_same_image() -> None:
    pipe = pipeline()
    expected = image(pipe)
    engine = slipstream.init_inference(pipe, **FUSED)
    assert engine.report()["text_encoder"].level == "block"
    torch.testing.assert_close(image(engine), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(image(pipe), expected, atol=1e-4, rtol=1e-4)
    assert float(expected.std()) > 0.05
    assert isinstance(pipe.unet, diffusers.UNet2DConditionModel) and pipe.components["unet"] is pipe.unet
    assert engine.scheduler is pipe.scheduler


def test_the_models_that_a_pipeline_had_are_left_as_they_were() -> None:
    pipe = pipeline()
    had = {name: pipe.components[name] for name in ("unet", "vae", "text_encoder")}
    before = {name: {n: t.clone() for n, t in m.state_dict().items()} for name, m in had.items()}
    slipstream.init_inference(pipe, dtype=torch.bfloat16, replace_with_kernel_inject=True)
    assert pipe.unet.dtype == pipe.vae.dtype == pipe.text_encoder.dtype == torch.bfloat16
    for name, model in had.items():
        assert model is not pipe.components[name]
        state = model.state_dict()
        assert all(torch.equal(state[n], t) for n, t in before[name].items())


NOISE = {"hidden_states": torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(5))}
TOKENS = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(6))
STEP = torch.tensor([3, 900])


def sd3() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64,
        pos_embed_max_size=8,
    )  # fmt: skip
    pooled = torch.randn(2, 64, generator=torch.Generator().manual_seed(7))
    return model, {**NOISE, "encoder_hidden_states": TOKENS, "pooled_projections": pooled, "timestep": STEP}


def flux() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(8)
    return model, {
        "hidden_states": torch.randn(2, 16, 4, generator=generator),
        "encoder_hidden_states": TOKENS,
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.3, 0.9]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }


def pixart() -> tuple[nn.Module, dict[str, Any]]:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
        cross_attention_dim=32, out_channels=8, caption_channels=32, use_additional_conditions=False,
    )  # fmt: skip
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    extra = {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}, "encoder_attention_mask": mask}
    return model, {**NOISE, "encoder_hidden_states": TOKENS, "timestep": STEP, **extra}


def conditioned(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    return unet(**options), {
        "sample": NOISE["hidden_states"], "timestep": STEP, "encoder_hidden_states": TOKENS,
    }  # fmt: skip


def autoencoder() -> tuple[nn.Module, dict[str, Any]]:
    sample = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(9))
    return vae(), {"sample": sample}


COMPONENTS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "UNet2DConditionModel": conditioned,
    "of linear projections": functools.partial(conditioned, use_linear_projection=True),
    "of scales and shifts": functools.partial(conditioned, resnet_time_scale_shift="scale_shift"),
    "SD3Transformer2DModel": sd3,
    "FluxTransformer2DModel": flux,
    "PixArtTransformer2DModel": pixart,
    "AutoencoderKL": autoencoder,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", COMPONENTS)
def test_a_component_by_itself_answers_as_the_original(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, inputs = COMPONENTS[name]()
    model = model.eval()
    with torch.no_grad():  # random transformers begin as the identity
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        exact = model(**inputs)[0]
    engine = slipstream.init_inference(copy.deepcopy(model), **{**FUSED, "dtype": dtype})
    given = {
        n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in inputs.items()
    }
    got = engine(**given)[0].float()
    size = float(exact.abs().max())
    if dtype == torch.float32:
        torch.testing.assert_close(got / size, exact / size, atol=1e-5, rtol=0.0)
    else:  # rounding grows through the layers, and no more than in the original's own code
        with torch.no_grad():
            own = model.to(dtype)(**given)[0].float()
        off, theirs = (float((y - exact).square().mean().sqrt()) / size for y in (got, own))
        assert off <= 1.2 * theirs + 1e-3
    if "attention" in str(engine.report().notes):
        assert any(attends(module) for module in engine.module.modules())
    assert list(engine.state_dict()) == list(model.state_dict())


def test_attention_that_the_op_does_not_serve_is_torchs() -> None:
    model, inputs = conditioned()
    engine = slipstream.init_inference(copy.deepcopy(model), **FUSED)
    if not any(attends(module) for module in engine.module.modules()):
        pytest.skip(HAS_KERNEL)
    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])
    expected = model(**inputs, encoder_attention_mask=mask).sample.detach()
    torch.testing.assert_close(
        engine(**inputs, encoder_attention_mask=mask).sample, expected, atol=1e-5, rtol=1e-4
    )
    asked = engine.module(**{**inputs, "sample": inputs["sample"].clone().requires_grad_()}).sample
    asked.sum().backward()  # gradients are torch's affair
    torch.testing.assert_close(asked.detach(), model(**inputs).sample.detach(), atol=1e-5, rtol=1e-4)


OP = Bound("feed_forward", "kernel", OPS["feed_forward"].reference)
BENDS = ["gelu", "gelu-approximate", "geglu", "geglu-approximate", "swiglu"]


@pytest.mark.parametrize("activation", BENDS)
@pytest.mark.parametrize("bias", [False, True])
def test_feed_forwards_answer_alike_as_a_whole_unless_somebody_could_tell(
    activation: str, bias: bool
) -> None:
    torch.manual_seed(0)
    feed = diffusers.models.attention.FeedForward(16, activation_fn=activation, bias=bias, final_dropout=True)
    model = nn.ModuleList([feed]).eval()
    x = torch.randn(3, 100, 16)
    with torch.no_grad():
        expected = feed(x)
    calls: list[int] = []

    def counted(rows: Tensor, *weights: Any, **how: Any) -> Tensor:
        calls.append(len(rows))
        out: Tensor = OP.run(rows, *weights, **how)
        return out

    plan = plan_feeds(model, Bound("feed_forward", "kernel", counted))
    assert (
        plan.whole == ("0",) and not plan.sliced and plan.notes == ["1 feed-forwards run kernel as a whole"]
    )
    swap_feeds(model, plan)
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(feed(x), expected)
        assert calls == [300]
        feed.net[2].weight.mul_(2.0)  # what becomes of the weights later is followed
        if bias:
            feed.net[2].bias.mul_(2.0)
        torch.testing.assert_close(feed(x), 2 * expected)
        torch.testing.assert_close(feed(x[:, :9]), 2 * expected[:, :9])
        assert calls == [300, 300]  # so few run the module's own code
        hook = feed.net[0].register_forward_hook(lambda *_: None)
        torch.testing.assert_close(feed(x), 2 * expected)
        hook.remove()
        feed.net[2] = nn.Sequential(feed.net[2])  # as an adapter would
        torch.testing.assert_close(feed(x), 2 * expected)
    feed(x.requires_grad_()).sum().backward()
    assert calls == [300, 300] and x.grad is not None


def test_a_feed_forward_that_answers_otherwise_than_the_op_is_none_of_its() -> None:
    class GELU(diffusers.models.activations.GELU):
        def gelu(self, gate: Tensor) -> Tensor:
            return 2 * super().gelu(gate)

    GELU.__module__ = diffusers.models.activations.__name__
    feed = diffusers.models.attention.FeedForward(16, activation_fn="gelu")
    feed.net[0] = GELU(16, 64)
    plan = plan_feeds(nn.ModuleList([feed]), OP)
    assert plan.sliced == ("0",) and not plan.whole


@pytest.mark.parametrize("activation", BENDS)
def test_feed_forwards_answer_alike_in_slices_unless_somebody_could_tell(activation: str) -> None:
    torch.manual_seed(0)
    feed = diffusers.models.attention.FeedForward(16, activation_fn=activation)
    model = nn.ModuleList([feed, nn.Linear(16, 16)]).eval()
    x = torch.randn(3, 1111, 16)  # 3333 tokens: the last slice is short
    with torch.no_grad():
        expected = feed(x)
    own = feed.net[2].forward
    calls: list[int] = []
    feed.net[2].forward = lambda rows: (calls.append(rows.numel() // rows.shape[-1]), own(rows))[1]
    plan = plan_feeds(model, Bound("feed_forward", "reference", OPS["feed_forward"].reference))
    assert plan.sliced == ("0",) and not plan.whole
    swap_feeds(model, plan)
    with torch.no_grad():
        torch.testing.assert_close(feed(x), expected)
        assert sum(calls) == 3333 and max(calls) < 3333
        torch.testing.assert_close(feed(x[:, :9]), expected[:, :9])
        assert calls.pop() == 27
        feed.net[0].register_forward_hook(lambda *_: None)
        torch.testing.assert_close(feed(x), expected)
        assert calls.pop() == 3333
    feed(x.requires_grad_()).sum().backward()
    assert calls.pop() == 3333 and x.grad is not None


def test_a_feed_forward_with_a_part_that_nobody_knows_runs_whole() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(dim=1, keepdim=True)

    feed = diffusers.models.attention.FeedForward(16)
    feed.net.append(Mixing())
    plan = plan_feeds(nn.ModuleList([feed]), OP)
    assert not plan.whole and not plan.sliced


def test_convolutions_have_their_channels_last_and_are_saved_and_refreshed_as_ever(tmp_path: Path) -> None:
    model, inputs = conditioned()
    engine = slipstream.init_inference(copy.deepcopy(model), **FUSED)
    weight = engine.module.conv_in.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert "convolutions are in channels_last layout" in str(engine.report())
    engine.save_checkpoint(tmp_path)
    again = diffusers.UNet2DConditionModel.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    engine.refresh_weights(model)
    assert engine.module.conv_in.weight is weight
    torch.testing.assert_close(engine(**inputs).sample, model(**inputs).sample.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(1, 5, 7), (2, 8, 8), (1, 1, 1), (2, 16, 16)])
def test_wide_convolutions_of_small_images_multiply_windows(
    shape: tuple[int, int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    batch, height, width = shape
    own = nn.Conv2d(1536, 6, 3, padding=1).to(memory_format=torch.channels_last)
    model = nn.ModuleList([copy.deepcopy(own).to(dtype)]).eval()
    multiply_windows(model, ("0",))
    x = torch.randn(batch, 1536, height, width).contiguous(memory_format=torch.channels_last)
    runs: list[Tensor] = []
    monkeypatch.setattr(nn.Conv2d, "forward", lambda *args: runs.append(args[1]))
    with torch.no_grad():
        got = model[0](x.to(dtype))
        expected = torch.nn.functional.conv2d(x, own.weight, own.bias, padding=1)
    assert not runs and got.dtype == dtype and got.is_contiguous(memory_format=torch.channels_last)
    far = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(got.float(), expected, atol=far, rtol=far)


def test_convolutions_multiply_no_windows_where_that_is_slower_or_somebody_could_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = nn.ModuleList([nn.Conv2d(1100, 2, 3, padding=1).to(memory_format=torch.channels_last)])
    multiply_windows(model, ("0",))
    x = torch.randn(1, 1100, 6, 6).contiguous(memory_format=torch.channels_last)
    runs: list[Tensor] = []
    monkeypatch.setattr(nn.Conv2d, "forward", lambda *args: runs.append(args[1]))
    model[0](x)  # gradients are asked for
    with torch.no_grad():
        model[0](x.repeat(1, 1, 2, 2))  # 144 pixels of 1100 channels
        model[0](x.contiguous())  # channels first
        with torch.autocast("cpu"):
            model[0](x)
        assert len(runs) == 4
        model[0](x)
        assert len(runs) == 4


@pytest.mark.parametrize(
    "options",
    [{"stride": 2}, {"padding": 0}, {"dilation": 2}, {"groups": 2}, {"padding_mode": "circular"}],
    ids=str,
)
def test_other_convolutions_stay_as_they_are(options: dict[str, Any]) -> None:
    other = nn.Conv2d(1536, 2, 3, **{"padding": 1, **options})
    narrow, plain = nn.Conv2d(1024, 2, 3, padding=1), nn.Conv2d(1536, 2, 3, padding=1)
    assert wide_convolutions(nn.ModuleList([other, narrow, plain, nn.Conv2d(1536, 2, 1)])) == ("2",)


def test_the_report_says_what_runs_otherwise_and_nothing_of_what_cannot() -> None:
    model, _ = conditioned()
    report = slipstream.init_inference(model, **FUSED, enable_cuda_graph=True).report()
    assert "RuntimeError" not in str(report) and "runs its own code" not in str(report)
    assert "enable_cuda_graph has no effect: the CPU launches nothing" in str(report)
    if "the attention of" not in str(report):
        pytest.skip(HAS_KERNEL)
    attending = {layer.name for layer in report.layers if "attention" in layer.parts.values()}
    assert attending and attending <= {layer.name for layer in report.layers if layer.level == "module"}
    assert all(0 < layer.max_error < 1e-5 for layer in report.layers if layer.name in attending)


def test_linears_that_see_many_tokens_stay_torchs_where_torch_multiplies_those() -> None:
    engine = slipstream.init_inference(
        conditioned()[0], dtype=torch.bfloat16, replace_with_kernel_inject=True
    )
    assert not any(is_swapped(m) for m in engine.module.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("linear", [False, True])
def test_transformers_of_images_answer_with_their_channels_last(linear: bool) -> None:
    torch.manual_seed(0)
    own = diffusers.Transformer2DModel(2, 8, 16, norm_num_groups=4, use_linear_projection=linear).eval()
    model = nn.ModuleList([copy.deepcopy(own)])
    assert image_transformers(model) == ("0",)
    keep_channels_last(model, ("0",))
    x = torch.randn(2, 16, 6, 10).contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        expected, got = own(x).sample, model[0](x).sample
    torch.testing.assert_close(got, expected)
    assert got.is_contiguous(memory_format=torch.channels_last)
    assert expected.is_contiguous() or linear
    x.requires_grad_()
    (ours,) = torch.autograd.grad(model[0](x).sample.sum(), x)
    (theirs,) = torch.autograd.grad(own(x).sample.sum(), x)
    torch.testing.assert_close(ours, theirs)


def test_a_transformer_that_puts_its_image_together_in_another_way_stays_as_it_is() -> None:
    class Doubling(diffusers.Transformer2DModel):
        def _get_output_for_continuous_inputs(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return 2 * super()._get_output_for_continuous_inputs(hidden_states, **kwargs)

    doubling = Doubling(2, 8, 16, norm_num_groups=4)
    plain = diffusers.Transformer2DModel(2, 8, 16, norm_num_groups=4)
    assert image_transformers(nn.ModuleList([doubling, plain])) == ("1",)


def test_a_division_by_one_copies_nothing_and_others_divide() -> None:
    x = torch.randn(3, 4)
    with _Attend(lambda *_, **__: x):
        assert (x / 1.0) is x
        assert torch.equal(x / 2.0, x.mul(0.5)) and (x / torch.ones(())) is not x
        assert (torch.ones(3, 4, dtype=torch.int64) / 1.0).dtype == torch.float32


def test_a_processor_that_is_set_later_is_served() -> None:
    from diffusers.models.attention_processor import AttnProcessor

    model, inputs = conditioned()
    engine = slipstream.init_inference(copy.deepcopy(model), **FUSED)
    engine.module.set_attn_processor(AttnProcessor())
    torch.testing.assert_close(engine(**inputs).sample, model(**inputs).sample.detach(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("how", ["trace", "export"])
def test_what_records_operations_gets_torchs_attention(how: str) -> None:
    original, engine = unet(), slipstream.init_inference(unet(), **FUSED)
    first, other = (
        tuple(
            torch.randn(s, generator=torch.Generator().manual_seed(seed)) for s in ((2, 4, 8, 8), (2, 7, 32))
        )
        for seed in (8, 9)
    )
    step = torch.tensor(5)
    with torch.no_grad():
        expected = original(other[0], step, other[1]).sample
        given, inputs = (first[0], step, first[1]), (other[0], step, other[1])
        if how == "trace":
            got = torch.jit.trace(engine.module, given, strict=False, check_trace=False)(*inputs)["sample"]
        else:
            got = torch.export.export(engine.module, given, strict=False).module()(*inputs).sample
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_pipeline_with_one_bad_component_is_left_as_it_was() -> None:
    broken = unet()
    with torch.no_grad():
        next(broken.parameters()).view(-1)[0] = torch.nan
    pipe = pipeline(unet=broken)
    had = dict(pipe.components)
    with pytest.raises(slipstream.WeightError, match=r"^unet of StableDiffusionPipeline: .*NaN"):
        slipstream.init_inference(pipe, **FUSED)
    assert all(pipe.components[name] is part for name, part in had.items())
    assert not any(attends(module) for name in had for module in modules_of(had[name]))


def modules_of(part: Any) -> list[nn.Module]:
    return list(part.modules()) if isinstance(part, nn.Module) else []


def test_a_missing_component_fails_as_in_the_original() -> None:
    engine = slipstream.init_inference(pipeline(unet=None), **FUSED)
    assert set(engine.report()) == {"vae", "text_encoder"}
    with pytest.raises(AttributeError) as theirs:
        image(pipeline(unet=None))
    with pytest.raises(AttributeError) as ours:
        image(engine)
    assert str(ours.value) == str(theirs.value)


def test_what_is_no_pipeline_of_models_is_refused() -> None:
    class Empty:
        components: dict[str, Any] = {}

    with pytest.raises(slipstream.ConfigError, match="Empty has no component"):
        slipstream.init_inference(Empty())
    with pytest.raises(slipstream.UnsupportedError, match="enable_cuda_graph=True is for one model"):
        slipstream.init_inference(pipeline(), enable_cuda_graph=True, **FUSED)
    pipe = pipeline()
    slipstream.init_inference(pipe, **FUSED)
    with pytest.raises(slipstream.InjectionError, match="already runs a fused"):
        slipstream.init_inference(pipe, **FUSED)
