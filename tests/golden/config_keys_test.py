"""Config.json as transformers' own classes write it, with their defaults and with keys of the older spelling:
every key is taken, and the rope that we read, and its table, are those of transformers. Skipped where
transformers is not installed."""

import copy
import json
import os
import random
import subprocess
import sys
import unittest

try:
    import torch
    import transformers
except ImportError:
    sys.exit(77)

FAMILIES = {
    "LlamaForCausalLM": "LlamaConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Qwen3MoeForCausalLM": "Qwen3MoeConfig",
    "MistralForCausalLM": "MistralConfig",
    "MixtralForCausalLM": "MixtralConfig",
    "Olmo2ForCausalLM": "Olmo2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "GptOssForCausalLM": "GptOssConfig",
    "DeepseekV2ForCausalLM": "DeepseekV2Config",
    "DeepseekV3ForCausalLM": "DeepseekV3Config",
    "Glm4MoeForCausalLM": "Glm4MoeConfig",
    "Llama4ForCausalLM": "Llama4TextConfig",
    "GPT2LMHeadModel": "GPT2Config",
    "Gemma3ForConditionalGeneration": "Gemma3Config",
    "Llama4ForConditionalGeneration": "Llama4Config",
    "Gemma4ForConditionalGeneration": "Gemma4Config",
    "GraniteForCausalLM": "GraniteConfig",
    "SmolLM3ForCausalLM": "SmolLM3Config",
    "Phi3ForCausalLM": "Phi3Config",
    "NemotronHForCausalLM": "NemotronHConfig",
    "Qwen3VLForConditionalGeneration": "Qwen3VLConfig",
    "Qwen3NextForCausalLM": "Qwen3NextConfig",
    "Qwen3_5ForCausalLM": "Qwen3_5TextConfig",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5Config",
}
# Keys of every config: values that are computed here where the default is not, and missing sizes.
NEEDED = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "MixtralForCausalLM": {"head_dim": 128},
    "Gemma4ForConditionalGeneration": {"text_config": {"hidden_size_per_layer_input": 0}, "audio_config": None},
}
POSITIONS = 5  # of read_configs
# With one rope for all layers.
ROPES = [name for name in list(FAMILIES)[:13] if name != "Gemma3ForCausalLM"]
ROPES += ["GraniteForCausalLM", "SmolLM3ForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM"]


def written(architecture, **keys):
    """What save_pretrained writes."""
    config = getattr(transformers, FAMILIES[architecture])(**keys)
    return json.loads(config.to_json_string(use_diff=False)) | {"architectures": [architecture]}


def read(configs):
    text = "".join(json.dumps(config) + "\n" for config in configs)
    out = subprocess.run([os.environ["TESSERA_READ_CONFIGS"]], input=text, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in out.stdout.splitlines()]


def rope_of(architecture, config):
    """As transformers reads it, without what says nothing: defaults, and the kind under its old name."""
    config = copy.deepcopy(config)
    rope = dict(getattr(transformers, FAMILIES[architecture]).from_dict(config).rope_parameters)
    rope.pop("type", None)
    for key, neutral in {"truncate": True, "beta_fast": 32.0, "beta_slow": 1.0}.items():
        if rope.get(key) == neutral:
            del rope[key]
    own = {"default": set(), "linear": {"factor"},
           "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}}
    kind = rope["rope_type"]
    if kind in own:  # the rest is of other kinds: transformers warns of it
        rope = {key: value for key, value in rope.items()
                if key in own[kind] | {"rope_type", "rope_theta", "partial_rotary_factor"}}
    rope.pop("finetuned", None)
    if "factor" in rope and rope["factor"] is None:
        rope["factor"] = config["max_position_embeddings"] / rope["original_max_position_embeddings"]
    return rope


def table_of(architecture, config):
    """cos and sin of transformers' own module, of the pairs that turn: the rest of a head is left as it is."""
    read = getattr(transformers, FAMILIES[architecture]).from_dict(copy.deepcopy(config))
    module = sys.modules[getattr(transformers, architecture).__module__]
    [rotary] = [value for name, value in vars(module).items()
                if name.endswith("RotaryEmbedding") and "Vision" not in name and value.__module__ == module.__name__]
    found = rotary(config=read)(torch.zeros(1, POSITIONS, 1), torch.arange(POSITIONS)[None])
    cos, sin = (found.real, found.imag) if torch.is_tensor(found) else found
    pairs = rotary(config=read).inv_freq.numel()
    return cos[0, :, :pairs], sin[0, :, :pairs]


def drawn_rope(draw):
    kind = draw.choice(["default", "linear", "llama3", "yarn"])
    rope = {draw.choice(["rope_type", "type"]): kind}
    if kind != "default":
        rope["factor"] = draw.randint(2, 64) / 2
    if kind in ("llama3", "yarn") and draw.random() < 0.5:
        rope["original_max_position_embeddings"] = draw.randint(64, 8192)
    if kind == "llama3":
        rope |= {"low_freq_factor": draw.randint(2, 4) / 2, "high_freq_factor": draw.randint(8, 16) / 2}
    if kind == "yarn":
        rope |= {key: value for key, value in
                 {"beta_fast": draw.randint(16, 64), "beta_slow": draw.randint(1, 2), "truncate": False,
                  "attention_factor": draw.randint(2, 6) / 2}.items() if draw.random() < 0.5}
        if draw.random() < 0.25:
            rope["factor"] = None  # as far as the positions go beyond the original ones
    return rope


def keys_of_other_kinds(draw, rope):
    """Keys that the kind of rope does not read, as people leave them there."""
    kind = rope.get("rope_type", rope.get("type"))
    own = {"default": [], "linear": ["factor"], "llama3": ["factor", "original_max_position_embeddings"],
           "yarn": ["factor", "original_max_position_embeddings", "beta_fast", "attention_factor"]}[kind]
    others = {"factor": 3.0, "original_max_position_embeddings": 1234, "beta_fast": 16.0, "attention_factor": 1.5,
              "finetuned": True}
    return {key: value for key, value in others.items() if key not in own and draw.random() < 0.3}


class ConfigKeys(unittest.TestCase):
    def test_every_key_that_transformers_writes_is_taken(self):
        configs = [written(name, **NEEDED.get(name, {})) for name in FAMILIES]
        for name, answer in zip(FAMILIES, read(configs)):
            with self.subTest(architecture=name):
                self.assertNotIn("refused", answer)
                self.assertEqual(answer["ignored"], [], "none of them is worth a word")

    def test_ropes_in_either_and_both_spellings_are_those_that_transformers_reads(self):
        draw, cases, configs = random.Random(20261128), [], []
        for number in range(6 * len(ROPES)):
            name = ROPES[number % len(ROPES)]
            base = written(name, **NEEDED.get(name, {}))
            part = base.pop("rope_parameters").get("partial_rotary_factor")
            rope, theta = drawn_rope(draw), float(draw.randint(1000, 1000000))
            rope |= keys_of_other_kinds(draw, rope)
            new = {"rope_parameters": dict(rope, rope_theta=theta)}
            old = {"rope_scaling": rope, "rope_theta": theta}
            if part is not None:
                part = draw.choice([part, part, 1.0])
                new["rope_parameters"]["partial_rotary_factor"] = part
                old["partial_rotary_factor"] = part
            base["max_position_embeddings"] = draw.randint(8192, 1 << 20)
            for keys in (new, old, new | old):
                cases.append(name)
                configs.append(base | copy.deepcopy(keys))
        for name, config, answer in zip(cases, configs, read(configs)):
            with self.subTest(architecture=name, config={k: v for k, v in config.items() if "rope" in k}):
                self.assertNotIn("refused", answer)
                self.assertEqual(rope_of(name, answer["config"]), rope_of(name, config))
                for found, expected in zip((answer["cos"], answer["sin"]), table_of(name, config)):
                    found, turned = torch.tensor(found), expected.shape[1]
                    torch.testing.assert_close(found[:, :turned], expected, atol=1e-5, rtol=1e-5)
                    rest = float(expected[0, 0] != 0)  # of a cosine 1, of a sine 0
                    self.assertTrue(found[:, turned:].eq(rest).all(), "the rest of a head stays")


if __name__ == "__main__":
    unittest.main()
