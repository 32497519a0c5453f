"""MiniMax-M3 as published: 428B parameters, of which a text token meets 23B; 60 layers, the first 3 dense in attention and MLP.

Sizes are those of the model's public configuration. Data, optimiser and length of its training are not published: what stands
here is a start for training at this size, and the pack and the tokenizer are the user's own. Differences: the published experts
clamp their gate (SwiGLU with limit 7 and slope 1.702), ours are plain SwiGLU.

    python train.py --config configs/m3.py --smoke                             the same structure, small, on a CPU
    python train.py --config configs/m3.py --set data.pack=P --set data.tokenizer=T    a cluster
"""

from msa_jax.config import (
    DataConfig,
    Experiment,
    ModelConfig,
    MoeConfig,
    MsaConfig,
    OptimConfig,
    StreamConfig,
    TrainConfig,
    VisionConfig,
)


def config() -> Experiment:
    return Experiment(
        name="m3",
        model=ModelConfig(
            attention=MsaConfig(
                d_model=6144, num_heads=64, num_kv_heads=4, head_dim=128, index_dim=128, block_size=128, num_blocks=16, rotary_dim=64
            ),
            vocab_size=200_064,
            num_layers=60,
            pattern="DDD" + "M" * 57,
            mlp_dim=12_288,
            mlp_limit=7.0,
            tie_embeddings=False,
            dtype="bfloat16",
            remat=True,
            vision=VisionConfig(
                width=1280, num_layers=32, num_heads=16, mlp_dim=5120, patch_size=14, temporal_patch_size=2, merge=2,
                norm_eps=1e-5, sequence_length=4096,
            ),
            moe=MoeConfig(num_experts=128, experts_per_token=4, expert_dim=3072, shared_dim=3072, dense_layers=3, routed_scale=2.0),
        ),
        data=DataConfig(
            sequence_length=8192,
            streams=(StreamConfig("text", rows=((0, 384),)), StreamConfig("captions", kind="captions", rows=((0, 128),))),
        ),
        optim=OptimConfig(learning_rate=2e-4, warmup_steps=2000, optimizer="muon"),
        train=TrainConfig(steps=1_000_000, index_warmup_steps=10_000, checkpoint_every=1000, z_loss_weight=1e-5),
    )  # fmt: skip
