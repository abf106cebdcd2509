"""What both sides of bench/fsdp2_compare --device cuda train, and how. Needs no torch."""

import dataclasses

SEED = 1
OPTIMIZER = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0
WARM_UP_STEPS = 5
INITIAL_DEVIATION = 0.02


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a model; experts = 0 is a dense one."""
    layers: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    inner: int  # of the MLP, or of one expert
    vocabulary: int
    sequence: int
    experts: int = 0
    chosen: int = 0
    eps: float = 1e-6
    theta: float = 1e6

    def active(self):
        """Parameters that multiply each token: not the embedding, of experts the chosen ones."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.key_heads)
        mlp = 3 * self.hidden * self.inner * (self.chosen or 1) + self.hidden * self.experts
        norms = 2 * self.hidden + (2 * self.head_dim if self.experts else 0)
        return (self.layers * (attention + mlp + norms) + self.hidden
                + self.hidden * self.vocabulary)

    def flops_a_token(self):
        """Forward and backward, as torchtitan counts and Tessera's `tflops` does."""
        return 6 * self.active() + 12 * self.layers * self.heads * self.head_dim * self.sequence

    def config_json(self):
        """What a Hugging Face folder of this shape holds."""
        common = {
            "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_heads, "head_dim": self.head_dim,
            "rms_norm_eps": self.eps, "rope_theta": self.theta,
            "max_position_embeddings": self.sequence, "tie_word_embeddings": False,
            "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
            "torch_dtype": "bfloat16"}
        if not self.experts:
            return {"architectures": ["LlamaForCausalLM"], "model_type": "llama",
                    "intermediate_size": self.inner, **common}
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
                "intermediate_size": self.inner * self.chosen, "moe_intermediate_size": self.inner,
                "num_experts": self.experts, "num_experts_per_tok": self.chosen,
                "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
                "output_router_logits": False, **common}


SHAPES = {
    "full": {
        # Llama 3's vocabulary, 16 layers: 1.5 B, of which 1.3 B multiply each token.
        "dense": Shape(layers=16, hidden=2048, heads=16, key_heads=8, head_dim=128, inner=8192,
                       vocabulary=128256, sequence=4096),
        # A sixth of the layers of Qwen3-30B-A3B and half of their experts: 2.8 B, of which 0.6 B
        # multiply each token.
        "moe": Shape(layers=8, hidden=2048, heads=32, key_heads=4, head_dim=128, inner=768,
                     vocabulary=65536, sequence=4096, experts=64, chosen=8)},
    "tiny": {
        "dense": Shape(layers=3, hidden=128, heads=4, key_heads=2, head_dim=32, inner=256,
                       vocabulary=512, sequence=128),
        "moe": Shape(layers=3, hidden=128, heads=4, key_heads=2, head_dim=32, inner=64,
                     vocabulary=512, sequence=128, experts=8, chosen=2)}}
