"""The model of the MSA paper (arXiv 2606.13392): 109B parameters, of which a text token meets 6B; MSA in each of 41 layers.

Published: 41 layers of width 3072, the first 3 with a dense MLP, then 128 routed experts (4 a token) and a shared one; 64 query
heads and 4 KV heads of width 128, 64 channels turned by RoPE, 200K tokens, 3T tokens of training of which the index branch warms
up for 40B. Not published, and chosen here so that the counts come out: experts of width 2304, dense MLPs of 9216, M3's ViT.
Optimiser, batch size and data are not published either; those below are a start, with the user's own pack and tokenizer.

    python train.py --config configs/paper_109b.py --smoke                             the same structure, small, on a CPU
    python train.py --config configs/paper_109b.py --set data.pack=P --set data.tokenizer=T    a cluster
"""

from msa_jax.config import Experiment, load, override


def config() -> Experiment:
    return override(load("m3.py", beside=__file__), {
        "name": "paper_109b", "model.attention.d_model": 3072, "model.num_layers": 41, "model.pattern": "M", "model.mlp_dim": 9216,
        "model.mlp_limit": None,
        "model.moe.expert_dim": 2304, "model.moe.shared_dim": 2304, "train.steps": 715_000, "train.index_warmup_steps": 9_500,
    })  # fmt: skip
