"""One example per field, swept: by name, by alias, "auto", wrong types, and the effect that is promised."""

from __future__ import annotations

import importlib.util
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.config import InferenceConfig, default_inference_config
from slipstream.config.deprecated import DEPRECATED, DEPRECATED_NAMES
from slipstream.config.document import fields
from slipstream.config.effects import EFFECTS
from slipstream.config.section import section_of
from slipstream.errors import ConfigError

GROUP = object()

# A value other than the default for every field that holds a value, by dotted name.
EXAMPLES: dict[str, Any] = {
    "replace_with_kernel_inject": True,
    "dtype": torch.bfloat16,
    "tensor_parallel.enabled": False,
    "tensor_parallel.tp_size": 4,
    "tensor_parallel.tp_grain_size": 32,
    "tensor_parallel.mpu": GROUP,
    "tensor_parallel.tp_group": GROUP,
    "tensor_parallel.step_timeout": 120,
    "enable_cuda_graph": True,
    "use_triton": True,
    "triton_autotune": True,
    "zero.stage": 3,
    "zero.offload_param.device": "cpu",
    "zero.offload_param.nvme_path": "/fast",
    "zero.offload_param.pin_memory": True,
    "zero.offload_param.buffer_count": 2,
    "zero.offload_param.buffer_size": 7,
    "zero.offload_param.max_in_cpu": 7,
    "zero.prefetch_bucket_size": 7,
    "zero.param_persistence_threshold": 7,
    "zero.model_persistence_threshold": 7,
    "zero.max_live_parameters": 7,
    "zero.max_reuse_distance": 7,
    "triangular_masking": False,
    "moe.enabled": False,
    "moe.ep_size": 2,
    "moe.moe_experts": [8],
    "moe.type": "residual",
    "moe.ep_mp_group": GROUP,
    "moe.ep_group": GROUP,
    "keep_module_on_host": True,
    "quant.enabled": False,
    "quant.activation.enabled": False,
    "quant.activation.num_bits": 8,
    "quant.activation.q_type": "asymmetric",
    "quant.activation.q_groups": 2,
    "quant.weight.enabled": False,
    "quant.weight.num_bits": 4,
    "quant.weight.q_type": "asymmetric",
    "quant.weight.q_groups": 16,
    "quant.weight.format": "fp8",
    "quant.weight.quantized_initialization": {"num_bits": 4},
    "quant.weight.post_init_quant": {"fc": {"num_bits": 4}},
    "quant.qkv.enabled": False,
    "quant.head": "int4",
    "quant.embedding": "int8",
    "injection_check": "fallback",
    "kv_cache_dtype": "int8",
    "screen_vocabulary": False,
    "checkpoint": "weights.json",
    "base_dir": "weights",
    "set_empty_params": True,
    "save_mp_checkpoint_path": "shards",
    "checkpoint_config.checkpoint_dir": "weights",
    "checkpoint_config.save_mp_checkpoint_path": "shards",
    "checkpoint_config.base_dir": "weights",
    "return_tuple": False,
    "training_mp_size": 2,
    "injection_policy": {nn.TransformerEncoderLayer: ("self_attn.out_proj", "linear2")},
    "injection_policy_tuple": ("linear2",),
    "config": {"hidden_size": 8},
    "max_out_tokens": 2048,
    "min_out_tokens": 2,
    "transposed_mode": True,
    "replace_method": "auto",
    "mp_size": 2,
    "mpu": GROUP,
    "ep_size": 2,
    "ep_group": GROUP,
    "ep_mp_group": GROUP,
    "moe_experts": [8],
    "moe_type": "residual",
}
# What a field needs beside it in order to be accepted, or to change anything.
COMPANIONS: dict[str, dict[str, Any]] = {
    "triton_autotune": {"use_triton": True},
    "base_dir": {"checkpoint": "weights.json"},
    "checkpoint_config.base_dir": {"checkpoint": "weights.json"},
    "training_mp_size": {"checkpoint": "weights.json"},
    "zero.stage": {"zero": {"offload_param": {"device": "cpu"}}},
    "zero.offload_param.nvme_path": {"zero": {"offload_param": {"device": "nvme"}}},
    "zero.offload_param.pin_memory": {"zero": {"offload_param": {"device": "cpu"}}},
}
PUBLIC = re.findall(
    r"\w+",
    """
    replace_with_kernel_inject dtype tensor_parallel enable_cuda_graph use_triton triton_autotune
    zero triangular_masking moe keep_module_on_host quant checkpoint base_dir set_empty_params
    save_mp_checkpoint_path checkpoint_config return_tuple training_mp_size replace_method
    injection_policy injection_policy_tuple config max_out_tokens min_out_tokens transposed_mode
    mp_size mpu ep_size ep_group ep_mp_group moe_experts moe_type
    """,
)
OURS = {"injection_check", "kv_cache_dtype", "screen_vocabulary"}
LEAVES = [name for name in fields() if not any(other.startswith(f"{name}.") for other in fields())]
INTEGERS = [name for name, value in EXAMPLES.items() if type(value) is int]
FLAGS = [name for name, value in EXAMPLES.items() if type(value) is bool]
TEXTS = [name for name, value in EXAMPLES.items() if type(value) is str and name != "checkpoint"]


@pytest.fixture(autouse=True)
def triton_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())


def nest(path: str, value: Any, beside: dict[str, Any] | None = None) -> dict[str, Any]:
    """Writes `a.b.c=value` as nested dictionaries, on top of what stands beside it."""
    name, _, rest = path.partition(".")
    beside = beside or {}
    return {**beside, name: nest(rest, value, beside.get(name)) if rest else value}


def build(path: str, value: Any) -> InferenceConfig:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return InferenceConfig(**nest(path, value, COMPANIONS.get(path)))


def read(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def default(path: str) -> Any:
    value: Any = default_inference_config()
    for name in path.split("."):
        value = value[name]
    return value


def aliases() -> list[tuple[str, str]]:
    """Lists (dotted name, the same with its last part by alias)."""
    found = []
    for path in fields():
        section = InferenceConfig
        *above, last = path.split(".")
        for name in above:
            section = section_of(section, name)
        if alias := section.model_fields[last].alias:
            found.append((path, ".".join([*above, alias])))
    return found


def test_every_field_has_an_example_other_than_its_default() -> None:
    assert sorted(EXAMPLES) == sorted(LEAVES)
    only_value = {"replace_method", "quant.activation.num_bits"}
    assert {path for path, value in EXAMPLES.items() if value == default(path)} == only_value


def test_every_field_of_the_public_interface_is_there() -> None:
    assert len(PUBLIC) == 32
    assert set(InferenceConfig.model_fields) == {*PUBLIC, *OURS}
    assert set(default_inference_config()) == {*PUBLIC, *OURS}


def test_every_alias_of_the_public_interface_is_there() -> None:
    assert {alias for _, alias in aliases() if "." not in alias} == {
        *("kernel_inject", "tp", "tm", "ckpt_config", "injection_dict", "args", "max_tokens", "min_tokens"),
        *("expert_group", "expert_mp_group"),
    }
    assert {alias for _, alias in aliases() if alias.startswith("moe.")} == {
        *("moe.num_experts", "moe.expert_group", "moe.expert_mp_group")
    }


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("dtype", torch.float16),
        ("max_out_tokens", 1024),
        ("tensor_parallel.tp_size", 1),
        ("tensor_parallel.tp_grain_size", 64),
        ("moe.moe_experts", [1]),
        ("moe.type", "standard"),
        ("quant.weight.num_bits", 8),
        ("quant.weight.q_type", "symmetric"),
        ("quant.enabled", True),
        ("base_dir", ""),
        ("return_tuple", True),
        ("triangular_masking", True),
        ("replace_method", "auto"),
        ("injection_check", "error"),
    ],
)
def test_defaults_are_those_of_the_public_interface(path: str, value: Any) -> None:
    assert read(InferenceConfig(), path) == default(path) == value


@pytest.mark.parametrize("path", LEAVES)
def test_a_field_acts_warns_or_is_refused_as_the_table_says(path: str) -> None:
    values = nest(path, EXAMPLES[path], COMPANIONS.get(path))
    kind = EFFECTS[path].kind
    if kind == "refused":
        with pytest.raises(ConfigError, match="is refused") as error:
            InferenceConfig(**values)
        assert path in str(error.value)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = InferenceConfig(**values)
    about = [str(w.message) for w in caught if path.partition(".")[0] in str(w.message)]
    moved = {entry.name: entry.replacement for entry in DEPRECATED}.get(path, "")
    idle = kind == "warns" or (moved and EFFECTS[moved].kind == "warns")
    assert bool(about) == bool(idle or path in DEPRECATED_NAMES), about
    assert read(config, path) == EXAMPLES[path]


@pytest.mark.parametrize(("path", "by_alias"), aliases())
def test_an_alias_means_its_field(path: str, by_alias: str) -> None:
    value = {"tp_size": 2} if path == "tensor_parallel" else EXAMPLES.get(path, {"base_dir": "weights"})
    assert read(build(by_alias, value), path) == read(build(path, value), path)
    assert read(build(by_alias, value), path) != read(InferenceConfig(), path)


@pytest.mark.parametrize(("path", "by_alias"), aliases())
def test_name_and_alias_together_must_agree(path: str, by_alias: str) -> None:
    value = {"tp_size": 2} if path == "tensor_parallel" else EXAMPLES.get(path, {"base_dir": "weights"})
    both = nest(by_alias, value, nest(path, value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert read(InferenceConfig(**both), path) == read(build(path, value), path)
    other = {} if isinstance(value, dict) else default(path)
    with pytest.raises(ConfigError) as error:
        InferenceConfig(**nest(by_alias, other, nest(path, value)))
    assert path in str(error.value)
    assert by_alias.rpartition(".")[2] in str(error.value)


@pytest.mark.parametrize("path", [*fields()])
def test_auto_means_the_default(path: str) -> None:
    expected = InferenceConfig()
    if path != "replace_method":
        assert InferenceConfig(**nest(path, "auto")) == expected


@pytest.mark.parametrize("path", INTEGERS)
@pytest.mark.parametrize("value", [True, "2", 1.5, None, [2], -1])
def test_an_integer_is_an_integer_in_bounds(path: str, value: Any) -> None:
    if path in ("moe_experts", "moe.moe_experts") and value == [2]:
        pytest.skip("a list is what this field holds")
    with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
        build(path, value)


@pytest.mark.parametrize("path", FLAGS)
@pytest.mark.parametrize("value", [0, 1, "true", None])
def test_a_flag_is_a_bool(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be True or False"):
        build(path, value)


@pytest.mark.parametrize("path", TEXTS)
@pytest.mark.parametrize("value", [3, True, ["a"]])
def test_a_text_or_a_choice_is_one_of_what_is_allowed(path: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=path.rpartition(".")[2]):
        build(path, value)


@pytest.mark.parametrize("section", [name for name in fields() if name not in LEAVES])
@pytest.mark.parametrize("value", [3, ["a"], 1.5])
def test_a_section_is_a_dictionary(section: str, value: Any) -> None:
    with pytest.raises(ConfigError, match="must be a dictionary of its fields"):
        build(section, value)


@pytest.mark.parametrize(
    ("section", "short"),
    [
        ("quant", "; or the name of a weight format: int8, int4, "),
        ("quant.weight", "; or the name of a weight format: int8, int4, "),
        ("quant.activation", "; or True or False"),
        ("moe", "; or True or False"),
    ],
)
def test_what_is_short_for_a_section_is_named(section: str, short: str) -> None:
    with pytest.raises(ConfigError, match=short):
        build(section, 3)


@pytest.mark.parametrize("section", ["", *(name for name in fields() if name not in LEAVES)])
def test_an_unknown_key_is_named_with_the_nearest_known_one(section: str) -> None:
    prefix = f"{section}." if section else ""
    known = next(name for name in LEAVES if name.startswith(prefix) and name.count(".") == prefix.count("."))
    with pytest.raises(ConfigError) as error:
        build(f"{known}s", 1)
    assert f"'{known}s'" in str(error.value)
    assert f"'{known}'" in str(error.value)


def test_the_table_of_effects_has_every_field_and_nothing_else() -> None:
    assert sorted(EFFECTS) == sorted(fields())
    for name, effect in EFFECTS.items():
        assert effect.kind in ("acts", "warns", "refused", "unserved"), name
        assert effect.sentence.endswith("."), name


def test_every_field_is_described_where_it_is_declared() -> None:
    for path in fields():
        section = InferenceConfig
        *above, last = path.split(".")
        for name in above:
            section = section_of(section, name)
        assert section.model_fields[last].description, path
